#!/bin/sh
# A control plane with kube-proxy, what the other machines need to join it, and the example services. Run as root.
set -eu
: "${NODE_ADDRESS:?the address of this machine in the lab}" "${SOURCE:=/hybrid-proxy}"
here=$SOURCE/vagrant
export KUBECONFIG=/etc/kubernetes/admin.conf

# What a former run has not finished begins anew.
if [ ! -e /etc/kubernetes/lab ]; then
    [ ! -e "$KUBECONFIG" ] || kubeadm reset --force
    kubeadm init \
        --apiserver-advertise-address "$NODE_ADDRESS" \
        --pod-network-cidr 10.244.0.0/16 \
        --service-cidr 10.96.0.0/16
    touch /etc/kubernetes/lab
fi

# The agents of all nodes: the rights of the manifests, for a group with a certificate instead of a pod's account.
kubectl apply -f "$SOURCE/deploy/base/rbac.yaml" -n kube-system
kubectl create clusterrolebinding hybrid-proxy-nodes --clusterrole hybrid-proxy --group hybrid-proxy:nodes \
    --dry-run=client -o yaml | kubectl apply -f -
install -d -m 700 /etc/hybrid-proxy
umask 077
# kubeadm names the card of the default route here, which is not the one that the API server has a certificate for.
[ -s /etc/hybrid-proxy/kubeconfig.conf ] ||
    kubeadm kubeconfig user --client-name hybrid-proxy:lab --org hybrid-proxy:nodes --validity-period 720h |
    sed "s#server: .*#server: https://$NODE_ADDRESS:6443#" >/etc/hybrid-proxy/kubeconfig.conf
sh "$here/provision/network.sh"

# What the workers need, over the network of the lab's machines, unencrypted and for two hours: this is a lab.
install -d -m 700 /root/join
kubeadm token create --ttl 2h --print-join-command >/root/join/command
cp /etc/hybrid-proxy/kubeconfig.conf /root/join/kubeconfig.conf
user=/home/vagrant
if [ -d "$user" ]; then
    install -d -o vagrant -g vagrant -m 700 "$user/.kube" "$user/.ssh"
    install -o vagrant -g vagrant -m 600 "$KUBECONFIG" "$user/.kube/config"
    [ -e "$user/.ssh/id_ed25519" ] || runuser -u vagrant -- ssh-keygen -q -t ed25519 -N '' -f "$user/.ssh/id_ed25519"
    cp "$user/.ssh/id_ed25519.pub" /root/join/key.pub
    # `demo` reaches each machine of the lab so, this one too.
    grep -qFf /root/join/key.pub "$user/.ssh/authorized_keys" || cat /root/join/key.pub >>"$user/.ssh/authorized_keys"
    echo 'StrictHostKeyChecking accept-new' >"$user/.ssh/config"
    chown vagrant:vagrant "$user/.ssh/config"
fi
# --collect: a unit whose time is over would be in the way of the next one.
systemctl is-active -q lab-join || systemd-run -q --collect --unit lab-join --property RuntimeMaxSec=2h \
    python3 -m http.server --bind "$NODE_ADDRESS" --directory /root/join 8079

kubectl apply -f "$here/example.yaml"
install -m 755 "$here/demo.sh" /usr/local/bin/demo
