#!/bin/sh
# Joins the cluster of the machine at CONTROL_ADDRESS. Run as root.
set -eu
: "${CONTROL_ADDRESS:?the address of the control plane}" "${SOURCE:=/hybrid-proxy}"

umask 077
from=http://$CONTROL_ADDRESS:8079
install -d -m 700 /etc/hybrid-proxy
# The control plane may still be starting: twenty minutes.
echo "worker: waits for $from; it is there for two hours, and after vagrant provision control again"
curl -fsS --retry 240 --retry-delay 5 --retry-all-errors -o /etc/hybrid-proxy/kubeconfig.conf "$from/kubeconfig.conf"
if [ ! -e /etc/kubernetes/kubelet.conf ]; then
    [ ! -e /etc/kubernetes/pki/ca.crt ] || kubeadm reset --force # a former run has not finished
    join=$(curl -fsS "$from/command")
    case "$join" in
        "kubeadm join "*) ;;
        *) echo "worker: $from/command is no command to join: $join" >&2; exit 1 ;;
    esac
    # shellcheck disable=SC2086  # a list
    $join
fi
# The demonstration changes the proxy and the mode of every node from the control plane.
user=/home/vagrant
if [ -d "$user/.ssh" ]; then
    key=$(curl -fsS "$from/key.pub")
    grep -qF "$key" "$user/.ssh/authorized_keys" || echo "$key" >>"$user/.ssh/authorized_keys"
fi
# A kubelet's own credentials read no other Node.
KUBECONFIG=/etc/hybrid-proxy/kubeconfig.conf sh "$SOURCE/vagrant/provision/network.sh"
