#!/bin/sh
# The image of the agents, for containerd of this machine: the control plane builds it, the workers fetch it from there.
# Run as root, before control-plane.sh or worker.sh. With WHEELS, where no registry can be reached, there is none.
set -eu
: "${SOURCE:=/hybrid-proxy}" "${NODE_ADDRESS:?the address of this machine in the lab}" "${WHEELS:=}"
: "${CONTROL_ADDRESS:?the address of the control plane}"
[ -z "$WHEELS" ] || exit 0
# What containerd calls the image that deploy/components/image names.
name=$(sed -n 's/^ *newName: //p' "$SOURCE/deploy/components/image/kustomization.yaml")
tag=$(sed -n 's/^ *newTag: //p' "$SOURCE/deploy/components/image/kustomization.yaml")
full=docker.io/library/$name:$tag

umask 077
install -d -m 700 /root/join
# `vagrant provision` beside a `vagrant up` that is still at this step would write the same files.
exec 9>/root/join/lock
flock -n 9 || { echo "image: waits until another run of this script ends"; flock 9; }
file=/root/join/image.tar
if [ "$NODE_ADDRESS" = "$CONTROL_ADDRESS" ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -q -y --no-install-recommends buildah
    # With the registry: not every Debian knows short names.
    buildah bud --build-arg BASE=docker.io/library/debian:12-slim -f "$SOURCE/deploy/image/Dockerfile" -t "$full" "$SOURCE"
    rm -f "$file.new"
    buildah push "$full" "docker-archive:$file.new:$full"
    mv "$file.new" "$file"
else
    # The control plane may still be building: an hour.
    echo "image: waits for that of $CONTROL_ADDRESS; it offers it for two hours, and after vagrant provision control again"
    curl -fsS --retry 720 --retry-delay 5 --retry-all-errors -o "$file" "http://$CONTROL_ADDRESS:8079/image.tar"
fi
ctr -n k8s.io images import "$file"
[ "$NODE_ADDRESS" = "$CONTROL_ADDRESS" ] || rm "$file"
