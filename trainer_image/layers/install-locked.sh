#!/bin/sh
# install-locked.sh WHEELHOUSE REQUIREMENTS INSTALLER ENVIRONMENT
#
# Makes the virtual environment ENVIRONMENT with exactly what the lock REQUIREMENTS names, from the wheels in the
# directory WHEELHOUSE and from nowhere else. A wheel whose hash the lock does not list ends the build. The installer,
# uv, comes from the wheelhouse too, is checked against the lock INSTALLER, and leaves no trace.
set -eu
wheelhouse=$1 requirements=$2 installer=$3 environment=$4

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

wheel=
for candidate in "$wheelhouse"/uv-*.whl; do
    digest=$(sha256sum "$candidate" | cut -d ' ' -f 1)
    if grep -q -- "--hash=sha256:$digest" "$installer"; then wheel=$candidate; fi
done
if [ -z "$wheel" ]; then
    echo "$wheelhouse holds no uv wheel with a hash that $installer lists: fill it with" \
        "'pip download --no-deps --require-hashes -r $installer -r $requirements'" >&2
    exit 1
fi
python3.11 -m zipfile -e "$wheel" "$scratch/installer"
uv=$(find "$scratch/installer" -type f -path '*.data/scripts/uv')
chmod +x "$uv"

python3.11 -m venv --without-pip "$environment"
# Hard links from the unpacked wheels: gigabytes are written once.
UV_CACHE_DIR="$scratch/unpacked" UV_LINK_MODE=hardlink "$uv" --quiet --no-config --offline pip install \
    --python "$environment/bin/python" \
    --no-index --find-links "$wheelhouse" --only-binary :all: --require-hashes --no-deps \
    --requirement "$requirements"

# Needed only to link other programs against the libraries, or by a person's shell; and the installer's lock, which anybody could
# write to.
find "$environment" \( -name '*_static*.a' -o -path "$environment/.lock" -o -path "$environment/bin/[Aa]ctivate*" \) -delete
# No file changes after the build, so a module's bytecode is never compared with its source. A package may carry files
# for a later Python that do not compile; the interpreter never reads them. One process and one order: what a process has
# compiled before shows in the bytes of what it compiles next. What that process imports while it starts must not be written
# before it is compiled.
PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m compileall -q --invalidation-mode unchecked-hash \
    "$environment/lib" >/dev/null || true
