#!/bin/sh
# Installs hybrid-proxy from its source on this machine, as a service of systemd. Run as root; run it again to upgrade:
# traffic goes on meanwhile. It starts when /etc/hybrid-proxy/kubeconfig.conf is there; with START=no it stays off until
# somebody enables it. WHEELS is a folder with a built hybrid-proxy and all Python packages that it needs: with it nothing is
# compiled, and no registry of Python packages is asked. DROP_IN=ipvs gives the service the rights of that mode, too.
#
#   SOURCE=/hybrid-proxy [WHEELS=/wheels] sh hybrid-proxy.sh
set -eu
: "${SOURCE:=/hybrid-proxy}" "${PREFIX:=/opt/hybrid-proxy}" "${START:=yes}" "${WHEELS:=}" "${DROP_IN:=}"

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
compilers="clang gcc libbpf-dev libc6-dev linux-libc-dev llvm make python3-dev"
[ -z "$WHEELS" ] || compilers=
# shellcheck disable=SC2086 # a list of packages
apt-get install -q -y --no-install-recommends libbpf1 iptables python3-venv $compilers

# Built from a copy: the source may be read-only, and other machines build from it, too.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for part in pyproject.toml setup.py README.md Makefile bpf hybrid_proxy controller dataplane workshop docs examples deploy; do
    cp -a "$SOURCE/$part" "$work/"
done
rm -rf "$work/dataplane/modes/ebpf/objects"
[ -x "$PREFIX/bin/pip" ] || python3 -m venv "$PREFIX"
cd "$work/deploy/image"
if [ -n "$WHEELS" ]; then
    export PIP_NO_INDEX=yes PIP_FIND_LINKS="$WHEELS"
    "$PREFIX/bin/pip" install --quiet --require-hashes -r requirements.txt -r workshop.txt
    "$PREFIX/bin/pip" install --quiet --no-deps --force-reinstall "$WHEELS"/hybrid_proxy-*.whl
else
    "$PREFIX/bin/pip" install --quiet --require-hashes -r build.txt -r requirements.txt -r workshop.txt
    "$PREFIX/bin/pip" install --quiet --no-deps --no-build-isolation "$work"
fi
ln -sf "$PREFIX/bin/hybrid-proxy" /usr/local/bin/hybrid-proxy

install -d -m 700 /etc/hybrid-proxy
[ -e /etc/hybrid-proxy/config.conf ] || install -m 600 "$work/deploy/base/config.conf" /etc/hybrid-proxy/config.conf
install -D -m 644 "$work/deploy/systemd/hybrid-proxy.service" /etc/systemd/system/hybrid-proxy.service
[ -z "$DROP_IN" ] || install -D -m 644 -t /etc/systemd/system/hybrid-proxy.service.d \
    "$work/deploy/systemd/hybrid-proxy.service.d/$DROP_IN.conf"
hybrid-proxy --help >/dev/null

[ "$START" = no ] || systemctl enable -q hybrid-proxy
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
if [ -e /etc/hybrid-proxy/kubeconfig.conf ] && systemctl is-enabled -q hybrid-proxy; then systemctl restart hybrid-proxy; fi
