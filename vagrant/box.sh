#!/bin/sh
# Makes a box of Debian 12 for vagrant-libvirt, of this machine's architecture, out of Debian's packages. Run as root:
#
#   sh box.sh FILE.box [OPTION OF mmdebstrap ...]
#   vagrant box add --name debian-here FILE.box && BOX=debian-here vagrant up --provider libvirt
#
# The machines start from the kernel that lies in the box, so the user of libvirt's QEMU has to be able to read that folder:
# set VAGRANT_HOME where a home is private. Needs mmdebstrap, e2fsprogs, qemu-utils and vagrant (for its public key).
set -eu
: "${KEY:=$(find / -xdev -path '*/vagrant-*/keys/vagrant.pub' 2>/dev/null | head -n 1)}" "${SUITE:=bookworm}" "${GIBIBYTES:=20}"
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
for tool in mmdebstrap mke2fs qemu-img; do
    command -v "$tool" >/dev/null || { echo "box: $tool is not installed" >&2; exit 1; }
done
file=$(realpath "$1")
shift
[ -r "$KEY" ] || { echo "box: Vagrant's public key is not here: set KEY to its file vagrant.pub" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=linux-image-cloud-$(dpkg --print-architecture),systemd-sysv,dbus,udev,openssh-server,sudo,rsync,ca-certificates
packages=$packages,iproute2,ifupdown,isc-dhcp-client,procps
mmdebstrap --variant=minbase --aptopt='Acquire::Languages "none"' --include="$packages" "$@" "$SUITE" "$work/root"

# What Vagrant expects of a box: its user, its key, no password for sudo, and the first card by DHCP.
root=$work/root
chroot "$root" useradd --create-home --shell /bin/bash vagrant
echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/vagrant"
mkdir -m 700 "$root/home/vagrant/.ssh"
cp "$KEY" "$root/home/vagrant/.ssh/authorized_keys"
chroot "$root" chown -R vagrant: /home/vagrant/.ssh
printf 'auto lo eth0\niface lo inet loopback\niface eth0 inet dhcp\n' >"$root/etc/network/interfaces"
echo 'LABEL=root / ext4 defaults 0 1' >"$root/etc/fstab"
echo debian >"$root/etc/hostname"

cp "$root"/boot/vmlinuz-* "$work/vmlinuz"
cp "$root"/boot/initrd.img-* "$work/initrd"
truncate -s "${GIBIBYTES}G" "$work/disk"
mke2fs -q -t ext4 -L root -d "$root" "$work/disk"
qemu-img convert -O qcow2 "$work/disk" "$work/box.img"
echo "{\"provider\": \"libvirt\", \"format\": \"qcow2\", \"virtual_size\": $GIBIBYTES}" >"$work/metadata.json"
cat >"$work/Vagrantfile" <<'RUBY'
Vagrant.configure("2") do |config|
  config.vm.provider :libvirt do |machine|
    machine.kernel   = File.expand_path("vmlinuz", __dir__)
    machine.initrd   = File.expand_path("initrd", __dir__)
    machine.cmd_line = "root=LABEL=root rw net.ifnames=0 console=ttyS0"
  end
end
RUBY
tar -c -C "$work" metadata.json Vagrantfile vmlinuz initrd box.img | gzip -1 >"$file"
