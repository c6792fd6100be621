#!/bin/sh
# The pods' network, with nothing that comes from elsewhere: the plugin ptp gives each pod of this node a pair of
# interfaces and an address out of the node's range, and a service sets routes to the ranges of the other nodes.
# Run as root on a node that has joined; KUBECONFIG may list Nodes.
set -eu
: "${KUBECONFIG:?a file that may list Nodes}"
export KUBECONFIG

name=$(hostname)
range=
for _ in $(seq 60); do
    range=$(kubectl get nodes --field-selector "metadata.name=$name" -o 'jsonpath={.items[*].spec.podCIDR}' || true)
    [ -z "$range" ] || break
    sleep 2
done
[ -n "$range" ] || { echo "network: node $name has no podCIDR after two minutes" >&2; exit 1; }

install -d /etc/cni/net.d
cat >/etc/cni/net.d/10-pods.conflist <<PLUGINS
{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "ptp",
      "ipam": {"type": "host-local", "subnet": "$range", "routes": [{"dst": "0.0.0.0/0"}]}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
PLUGINS

cat >/usr/local/sbin/pod-routes <<'ROUTES'
#!/bin/sh
# A route to the pods of each other node, and masquerade of what leaves the cluster.
set -eu
nft -f - <<'RULES'
table ip pods-out
delete table ip pods-out
table ip pods-out {
    chain postrouting {
        type nat hook postrouting priority 110;
        ip saddr 10.244.0.0/16 ip daddr != { 10.244.0.0/16, 192.168.56.0/24 } masquerade
    }
}
RULES
while sleep 5; do
    kubectl get nodes -o 'jsonpath={range .items[*]}{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}' |
        while read -r node range address; do
            # A route that cannot be is no reason to leave out the others.
            [ "$node" = "$(hostname)" ] || [ -z "${address:-}" ] || ip route replace "$range" via "$address" || true
        done
done
ROUTES
chmod 755 /usr/local/sbin/pod-routes
cat >/etc/systemd/system/pod-routes.service <<UNIT
[Unit]
Description=Routes to the pods of other nodes
[Service]
Environment=KUBECONFIG=$KUBECONFIG
ExecStart=/usr/local/sbin/pod-routes
Restart=always
[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable -q --now pod-routes
