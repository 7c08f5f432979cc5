#!/usr/bin/env bash
# Run tests on an emulated arm64 processor. There, compilers compute arguments in another order, `char` has no sign,
# and all kernels are the portable ones.
#
#     tools/arm64.sh [PYTEST ARGUMENTS]      by default the tests of the kernels, the client and the daemon
#
# Needs root, and debootstrap, qemu-user-static and g++-aarch64-linux-gnu of Debian 12. The first run installs a
# Debian for arm64 into build/arm64, 0.9 GB. The native module is cross-compiled. The emulator has no io_uring and no
# GPU, its tests take about ten times as long, and the memory order is that of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/arm64/root objects=$PWD/build/arm64/objects
for tool in debootstrap qemu-aarch64-static aarch64-linux-gnu-g++; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: see the head of $0" >&2; exit 2; }
done

# The kernel starts programs for arm64 with the emulator.
formats=/proc/sys/fs/binfmt_misc
test -e $formats/register || mount -t binfmt_misc none $formats
if ! grep -qs qemu-aarch64 $formats/*; then
    magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":kvtier-arm64:M::$magic:$mask:$(command -v qemu-aarch64-static):OF" >$formats/register
fi

inside() { chroot "$root" /usr/bin/env -i HOME=/root PATH=/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@"; }

if ! test -e "$root/.ready"; then
    debootstrap --arch arm64 --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates,procps,g++ \
        bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}"
    cp /etc/resolv.conf "$root/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    inside python3 -m venv /venv
    python3 tools/requirements.py test | sed '$a nanobind' |
        inside pip install --quiet --only-binary :all: -r /dev/stdin
    touch "$root/.ready"
fi
mkdir -p "$root/kvtier" "$objects"
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract -C "$root/kvtier"

# Python.h includes pyconfig.h by this name.
nanobind=$root/venv/lib/python3.11/site-packages/nanobind
mkdir -p "$objects/include/aarch64-linux-gnu"
ln -sfn "$root/usr/include/aarch64-linux-gnu/python3.11" "$objects/include/aarch64-linux-gnu/python3.11"
compile() {
    aarch64-linux-gnu-g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -Wall -Wextra \
        -Wno-unused-parameter -DNDEBUG -Ikernels/include -Ikernels/cpu -isystem "$nanobind/include" \
        -isystem "$nanobind/ext/robin_map/include" -isystem "$root/usr/include/python3.11" -isystem "$objects/include" \
        -c "$1" -o "$objects/$(basename "$1").o"
}
export -f compile
export root objects nanobind
if ! test -e "$objects/done" || find kernels/include kernels/cpu -newer "$objects/done" | grep -q .; then
    printf '%s\n' kernels/cpu/*.cpp "$nanobind/src/nb_combined.cpp" | xargs -P "$(nproc)" -I{} bash -c 'compile "{}"'
    aarch64-linux-gnu-g++ -shared -pthread "$objects"/*.o -ldl \
        -o "$root/kvtier/kernels/kvtier_kernels/_native.cpython-311-aarch64-linux-gnu.so"
    touch "$objects/done"
fi

# Not after this script: whatever deletes build/ would delete the devices of this machine.
trap 'umount --recursive --lazy "$root/proc" "$root/dev" 2>/dev/null || true' EXIT
for one in proc dev; do
    mount --rbind "/$one" "$root/$one"
    mount --make-rslave "$root/$one"
done
test "$#" -gt 0 || set -- tests/kernels tests/kvtier tests/daemon
# Python 3.11.2 fails to explain some assertions.
inside PYTHONPATH=kvtier:daemon:kernels:plugins sh -c 'cd /kvtier && exec python -m pytest --assert=plain -p no:cacheprovider "$@"' \
    pytest "$@"
