#!/bin/sh
# demo.sh on a machine of the lab that has no kubelet and no kubectl, as root: pods are network namespaces, kube-proxy is a
# service of systemd, and the API server is another machine's. booted.py starts it.
#   sh one_node.sh migrate | MODE ... | back
set -eu
: "${PROXY:=/wheels/kube-proxy}" "${KUBECONFIG:=/wheels/kubeconfig}"
NODES=$(hostname)
export NODES DEMO_SOURCED=yes ROOT_COMMAND=env address=10.96.0.7

pod() { # pod NAME ADDRESS: with a route to it, as the plugin ptp makes them
    ip netns add "$1"
    ip link add "$1" type veth peer name eth0 netns "$1"
    ip addr add 169.254.1.1/32 dev "$1"
    ip link set "$1" up
    ip route add "$2" dev "$1"
    ip -n "$1" addr add "$2/32" dev eth0
    ip -n "$1" link set eth0 up
    ip -n "$1" route add 169.254.1.1 dev eth0
    ip -n "$1" route add default via 169.254.1.1
}
if [ ! -e /run/netns/client ]; then
    for n in 1 2 3; do
        pod "web-$n" "10.244.0.1$n"
        mkdir -p "/run/web-$n"
        printf 'web-%s' "$n" >"/run/web-$n/hostname"
        systemd-run -q --unit "web-$n" ip netns exec "web-$n" python3 -m http.server --directory "/run/web-$n" 8080
    done
    pod client 10.244.0.20
    cat >/run/systemd/system/kube-proxy.service <<UNIT
[Service]
ExecStart=$PROXY --kubeconfig $KUBECONFIG --proxy-mode nftables --hostname-override $NODES --cluster-cidr 10.244.0.0/16 \
    --kube-api-content-type application/json
Restart=on-failure
UNIT
    systemctl daemon-reload
    systemctl start kube-proxy
    install -D -m 600 "$KUBECONFIG" /etc/hybrid-proxy/kubeconfig.conf
fi

# What demo.sh asks of a cluster, done here.
kubectl() {
    case "$*" in
        "exec client -- "*) shift 3; ip netns exec client "$@" ;;
        *" patch "*" merge "*) systemctl stop kube-proxy ;;
        *" patch "*" json "*) systemctl restart kube-proxy ;;
        *" rollout status "*) until curl -sf -m 3 -o /dev/null http://127.0.0.1:10256/healthz; do sleep 1; done ;;
        *" wait "*) ;;
        *) echo "one_node: kubectl $*" >&2; return 1 ;;
    esac
}
# shellcheck source=vagrant/demo.sh
. /hybrid-proxy/vagrant/demo.sh
until ip netns exec client curl -s -m 3 -o /dev/null "http://$address/hostname"; do sleep 1; done
case "$1" in
    migrate | back) under_load "$1" ;;
    *) in_modes "$@" ;;
esac
