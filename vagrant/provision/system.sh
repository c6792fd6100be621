#!/bin/sh
# What a node needs of Debian: a container runtime, the plugins of its network, a kernel that forwards. Run as root.
set -eu

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends \
    ca-certificates conntrack containerd containernetworking-plugins curl ethtool iproute2 iptables kmod nftables \
    procps runc socat

# The kubelet refuses to start beside swap.
if [ -f /etc/fstab ]; then
    sed -i -E 's/^([^#].*[[:space:]]swap[[:space:]].*)$/# \1/' /etc/fstab
fi

# IPVS and its schedulers are for mode ipvs alone.
cat >/etc/modules-load.d/hybrid-proxy.conf <<'MODULES'
overlay
br_netfilter
nf_conntrack
ip_vs
ip_vs_rr
MODULES
cat >/etc/sysctl.d/99-hybrid-proxy.conf <<'SETTINGS'
net.ipv4.ip_forward = 1
net.ipv6.conf.all.forwarding = 1
SETTINGS

# systemd's control groups for containerd, as the kubelet has them; plugins where Debian puts them.
mkdir -p /etc/containerd
containerd config default |
    sed -e 's/SystemdCgroup = false/SystemdCgroup = true/' \
        -e 's#bin_dir = "/opt/cni/bin"#bin_dir = "/usr/lib/cni"#' >/etc/containerd/config.toml

# A container shares its host's kernel: there nothing is loaded, set or started.
if systemd-detect-virt --container --quiet || [ ! -d /run/systemd/system ]; then
    echo "system: no machine of its own, so modules, settings and services wait for the next start"
    exit 0
fi
swapoff -a
while read -r module; do modprobe "$module"; done </etc/modules-load.d/hybrid-proxy.conf
sysctl -q --system
mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf
systemctl restart containerd
systemctl enable -q containerd
