#!/bin/sh
# Leaves of a base image what a Python program needs at run time. Runs in a stage whose file system is then copied
# into an empty image, so nothing that is deleted here remains in a lower layer.
set -eu

case $0 in
    /mnt/layers/*) ;;
    *) echo "$0 deletes the package manager of the system it runs on: only the Containerfiles may run it" >&2; exit 1 ;;
esac
for program in python3.11 tini; do
    PATH=/usr/local/bin:/usr/bin:/bin command -v "$program" >/dev/null || {
        echo "BASE_IMAGE has no $program in /usr/local/bin, /usr/bin or /bin: use an image with Python 3.11 and tini" >&2
        exit 1
    }
done

# Installers of Python packages, wherever the base keeps its interpreter.
find / -xdev -type d \( -name ensurepip -o -name python-wheels -o -path '*-packages/pip' -o -path '*-packages/pip-*' \
    -o -path '*-packages/setuptools*' -o -path '*-packages/wheel*' -o -path '*-packages/pkg_resources' \) \
    -prune -exec rm -rf {} +
find /usr/local/bin /usr/bin \( -name 'pip*' -o -name 'wheel*' -o -name 'easy_install*' \) -delete

# Installers of system packages, and what fetches files. The list of what is installed stays: scanners for
# vulnerabilities read it.
find /usr/local/bin /usr/bin /usr/sbin \( -name 'apt*' -o -name 'dpkg*' -o -name 'debconf*' -o -name 'perl*' \
    -o -name curl -o -name wget \) -delete
rm -rf /etc/apt /etc/dpkg /usr/lib/apt /usr/lib/dpkg /usr/libexec/dpkg /usr/share/dpkg /usr/share/perl5 \
    /var/cache/apt /var/cache/debconf /var/lib/apt /var/log/apt
find /usr/lib -type d -name perl-base -prune -exec rm -rf {} +
if [ -d /var/lib/dpkg ]; then
    find /var/lib/dpkg -mindepth 1 -maxdepth 1 ! -name status ! -name status.d -exec rm -rf {} +
fi

# Documentation, without the licences.
rm -rf /usr/share/info /usr/share/lintian /usr/share/locale /usr/share/man
if [ -d /usr/share/doc ]; then find /usr/share/doc -type f ! -name copyright -delete; fi
find /var/log -type f -delete
rm -rf /root/.cache

# Programs that work with another's rights (su, passwd), and the group's right to write to directories.
find / -xdev -type f -perm /6000 -delete
find / -xdev -path /mnt -prune -o ! -type l ! -perm -1000 -perm /6022 -exec chmod ug-s,go-w {} +

# The standard library, compiled so that neither the time nor the order in which it was installed shows in the bytes.
library=$(python3.11 -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
find "$library" -name '*.pyc' -delete
PYTHONDONTWRITEBYTECODE=1 python3.11 -m compileall -q --invalidation-mode unchecked-hash -x '/(site|dist)-packages/|/lib2to3/tests/|/test/' "$library"
