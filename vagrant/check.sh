#!/bin/sh
# Names what this machine lacks for `vagrant up`, before an hour has passed. README.md has what is needed, and what MEMORY
# and EMULATE mean.
#
#   sh vagrant/check.sh    a line for each thing (!: it may do); exit code 1: something is missing
#
# shellcheck disable=SC2016,SC2317  # people read the words as they are; `check` calls the functions
set -u
missing=0

# check "WORDS (HINT)" COMMAND...: the command succeeds where this machine has it; otherwise the hint says what to do.
check() {
    words=$1
    shift
    if "$@" >/dev/null 2>&1; then
        echo "✓ ${words%% (*}"
    else
        echo "✗ $words"
        missing=1
    fi
}

new_vagrant() {
    vagrant --version | awk '{ split($2, part, "."); exit !(part[1] > 2 || part[1] == 2 && part[2] > 2) }'
}

has_plugin() {
    vagrant plugin list | grep -q '^vagrant-libvirt '
}

# Such as a VirtualBox that is newer than it.
validates() (
    cd "$(dirname "$0")" && vagrant validate
)

# The right to write to the file is not enough: the kernel may have nothing behind it.
opens() (
    [ -c "$1" ] && : <>"$1"
)

at_least() {
    [ "${1:-0}" -ge "$2" ]
}

# A registry answers 401 to who has not logged in.
answers() {
    curl --noproxy '*' -sSL --max-time 10 -o /dev/null -w '%{http_code}\n' "$1" | grep -qx '2..\|401'
}

# A network that an earlier `vagrant up` made is no obstacle.
is_unused() {
    case $(ip route get 192.168.56.10) in *' via '* | *' dev virbr'* | *' dev vboxnet'*) ;; *) false ;; esac
}

check 'Vagrant 2.3 or newer (apt-get install vagrant)' new_vagrant
check 'rsync (apt-get install rsync)' command -v rsync
check 'a provider that this Vagrant takes (vagrant validate, typed in vagrant, says what is wrong)' validates
if [ "${VAGRANT_DEFAULT_PROVIDER:-}" != libvirt ] && command -v VBoxManage >/dev/null; then
    check 'VirtualBox (VBoxManage --version says what is wrong)' VBoxManage --version
    disks=$HOME
    check 'a processor that virtualises (turn it on in the firmware)' grep -Eq 'vmx|svm|CPU implementer' /proc/cpuinfo
    # Since Linux 6.12 KVM takes the processor as soon as it is loaded.
    ! ls -d "${MODULES:-/sys/module}"/kvm_* >/dev/null 2>&1 ||
        echo '! KVM is loaded: VirtualBox may not get the processor (modprobe -r kvm_intel or kvm_amd)'
else
    check 'VirtualBox, or Vagrant'\''s plugin for libvirt (apt-get install vagrant-libvirt)' has_plugin
    check 'libvirt (apt-get install libvirt-daemon-system; adduser $USER libvirt, and log in again)' \
        virsh --connect qemu:///system list
    # Its pool has the machines' disks.
    disks=$(virsh --connect qemu:///system pool-dumpxml default 2>&- | sed -n 's#.*<path>\(.*\)</path>.*#\1#p')
    : "${disks:=/var/lib/libvirt/images}"
    if [ "${EMULATE:-no}" = yes ]; then
        :
    elif opens "${KVM:-/dev/kvm}" 2>/dev/null; then
        # There are machines where it opens, and no guest boots.
        echo '! KVM opens; whether a guest boots, only `vagrant up` shows'
    else
        check 'KVM (modprobe kvm_intel or kvm_amd; or "Without KVM" in README.md)' false
    fi
fi
free=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
need=$((3 * ${MEMORY:-2048}))
check "$need MiB of memory ($free are free)" at_least "$free" "$need"
while [ ! -e "$disks" ]; do disks=$(dirname "$disks"); done
free=$(df -Pk "$disks" | awk 'NR == 2 { print int($4 / 1048576) }')
check "20 GiB of disk, to begin with ($free are free in $disks)" at_least "$free" 20
at_least "$free" 60 || echo "! three machines may grow to 60 GiB in $disks"
check '192.168.56.0/24 for the machines (ip route get 192.168.56.10 says who has it)' is_unused
while read -r address what; do
    check "$what, without a proxy for HTTP (curl $address says what is wrong)" answers "$address"
done <<ADDRESSES
https://vagrantcloud.com/ the box
https://deb.debian.org/debian/dists/bookworm/Release Debian's packages
https://pkgs.k8s.io/core:/stable:/v${VERSION:-1.34}/deb/Release kubeadm
https://pypi.org/simple/pip/ Python packages
https://registry-1.docker.io/v2/ the base of the image, of docker.io
https://registry.k8s.io/v2/ Kubernetes' images
ADDRESSES
exit "$missing"
