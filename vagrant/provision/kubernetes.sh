#!/bin/sh
# kubelet, kubeadm and kubectl of version KUBERNETES (1.34) from the project's own package repository. Run as root.
set -eu
: "${KUBERNETES:=1.34}" "${NODE_ADDRESS:?the address of this machine in the lab}" "${LAB_HOSTS:=}"

site=https://pkgs.k8s.io/core:/stable:/v$KUBERNETES/deb
install -d -m 755 /etc/apt/keyrings
[ -s /etc/apt/keyrings/kubernetes.asc ] || curl -fsSL -o /etc/apt/keyrings/kubernetes.asc "$site/Release.key"
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.asc] $site/ /" >/etc/apt/sources.list.d/kubernetes.list

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends --no-upgrade kubeadm kubectl kubelet # the second time they are held
apt-mark hold kubeadm kubectl kubelet

# A machine of Vagrant has two cards; the kubelet would name the wrong one.
echo "KUBELET_EXTRA_ARGS=--node-ip=$NODE_ADDRESS" >/etc/default/kubelet

# LAB_HOSTS: "NAME=ADDRESS ...". Debian gives a machine's own name to 127.0.1.1, and Vagrant to 127.0.2.1 where that is taken;
# no node should be known by either.
sed -i '/^127\.0\.[1-9]\.1/d; /# lab$/d' /etc/hosts
for each in $LAB_HOSTS; do echo "${each#*=} ${each%%=*} # lab" >>/etc/hosts; done
systemctl enable -q kubelet
