#!/bin/busybox sh
# First process of the guest, out of the initramfs: the host's files, read-only, below a layer of memory.
# What stands between @ is put in by machine.py.
b=/bin/busybox
fail() { echo "init: $*"; $b poweroff -f; }
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in @MODULES@; do $b insmod /modules/$module || fail "insmod $module"; done
nine=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o ro,cache=loose,$nine host /host || fail "the host's files"
$b mount -t tmpfs -o size=75% memory /memory
$b mkdir /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /root || fail overlay
cd /root
for place in proc sys dev; do $b mount --move /$place $place; done
$b mkdir -p dev/pts dev/shm
$b mount -t devpts devpts dev/pts
$b mount -t tmpfs shm dev/shm
$b mount -t tmpfs run run   # the host's namespaces, sockets and locks are not the guest's
$b mkdir -p run/vm run/lock run/netns lib/modules/@RELEASE@
$b mount -t 9p -o cache=none,$nine control run/vm || fail "the control folder"
$b mount -t 9p -o ro,cache=loose,$nine modules lib/modules/@RELEASE@ || fail "the modules"
# Each read of the control folder is a question to the host, and tar would read 512 bytes at a time.
$b dd if=run/vm/checkout.tar bs=256k 2>/dev/null | $b tar -xf - -C .@CHECKOUT@ || fail "the checkout"
shared=@SHARED@
if [ -n "$shared" ]; then
    $b mkdir -p ".$shared"
    $b mount -t 9p -o cache=none,$nine shared ".$shared" || fail "the shared folder"
fi
$b mount -t bpf bpf sys/fs/bpf
$b mount -t tracefs tracefs sys/kernel/tracing
$b mount -t cgroup2 cgroup sys/fs/cgroup
$b ip link set lo up
$b hostname vm
# The first process itself changes its root: the kernel's own calls of modprobe then see the host's files too.
exec $b switch_root /root /bin/sh /run/vm/command.sh
