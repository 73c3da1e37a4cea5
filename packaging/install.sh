#!/bin/sh
# Installs gpunode from this offline bundle into /opt/gpunode, or removes it: sudo ./install.sh [--remove]
set -eu
umask 022
PATH=/usr/sbin:/usr/bin:/sbin:/bin
here=$(cd "$(dirname "$0")" && pwd)
cd /
mark=/opt/gpunode/installed-from-bundle
units="gpunode-device-plugin.service gpunode-doctor.service gpunode-doctor.timer"
if [ "$(id -u)" -ne 0 ]; then
    echo "error: installing gpunode needs root" >&2
    echo "hint: sudo $0" >&2
    exit 3
fi
case "${1:-}" in
    "" | --remove) ;;
    *)
        echo "error: unknown argument $1" >&2
        echo "hint: sudo $0 [--remove]" >&2
        exit 2
        ;;
esac
if [ "${1:-}" = --remove ] && [ ! -e /opt/gpunode ]; then
    echo "gpunode is not installed in /opt/gpunode"
    exit 0
fi
if [ -e /opt/gpunode ] && [ ! -e "$mark" ]; then
    echo "error: /opt/gpunode was not installed from a bundle" >&2
    echo "hint: remove it by the package manager, or move it away; then run this again" >&2
    exit 3
fi
# the libraries are built for this architecture and for the C library of Debian 10, RHEL 8 and later
libc=$(getconf GNU_LIBC_VERSION 2> /dev/null) || libc=
if [ "$(uname -m)" != x86_64 ] || [ -z "$libc" ] || ! printf '2.28\n%s\n' "${libc#glibc }" | sort -CV; then
    echo "error: this bundle is for Linux on x86_64 with glibc 2.28 or newer; this system is $(uname -m) with ${libc:-another C library}" >&2
    echo "hint: install gpunode's wheel in a virtual environment: /opt/gpunode/bin/pip install 'gpunode[all]'" >&2
    exit 3
fi
systemd() { [ ! -d /run/systemd/system ] || systemctl "$@"; }
if [ "${1:-}" = --remove ]; then
    for unit in $units; do
        systemd disable --now "$unit" 2> /dev/null || true
        rm -f "/usr/local/lib/systemd/system/$unit"
    done
    /opt/gpunode/warn-of-changes || true
    [ "$(readlink -f /usr/local/bin/gpunode)" != /opt/gpunode/bin/gpunode ] || rm -f /usr/local/bin/gpunode
    rm -rf /opt/gpunode
    rm -f /usr/local/share/man/man1/gpunode*.1.gz
    systemd daemon-reload
    echo "gpunode is removed; /etc/gpunode and /var/lib/gpunode stay"
    exit 0
fi
mkdir -p /opt
rm -rf /opt/gpunode.new
trap 'rm -rf /opt/gpunode.new' EXIT
cp -R "$here/opt/gpunode" /opt/gpunode.new
cp "$here/choose-python" /opt/gpunode.new/
# the user who unpacked the archive owns its files, but root runs them
chown -R root:root /opt/gpunode.new
chmod -R u=rwX,go=rX /opt/gpunode.new
touch "/opt/gpunode.new/${mark##*/}"
/opt/gpunode.new/choose-python /opt/gpunode.new
rm -rf /opt/gpunode
mv /opt/gpunode.new /opt/gpunode
mkdir -p /usr/local/bin /usr/local/lib/systemd/system /usr/local/share/man/man1 /etc/gpunode
link=/usr/local/bin/gpunode
if { [ -e "$link" ] || [ -L "$link" ]; } && [ "$(readlink -f "$link")" != /opt/gpunode/bin/gpunode ]; then
    echo "$link exists and is not this gpunode's: it stays; run /opt/gpunode/bin/gpunode" >&2
else
    ln -sf ../../../opt/gpunode/bin/gpunode "$link"
fi
for unit in $units; do
    install -m 644 "$here/units/$unit" "/usr/local/lib/systemd/system/$unit"
done
for page in "$here"/man/*.1.gz; do
    install -m 644 "$page" /usr/local/share/man/man1/
done
[ -e /etc/gpunode/env ] || install -m 644 "$here/env" /etc/gpunode/env
systemd daemon-reload
systemd try-restart gpunode-device-plugin.service
echo "gpunode is installed: gpunode doctor"
