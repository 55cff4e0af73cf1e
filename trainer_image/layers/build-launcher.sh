#!/bin/sh
# Compiles the one module that Triton would otherwise compile in every pod that starts kernels of its own, so that
# training.compile needs no compiler in the image. Its source comes with Triton and is the same for all kernels.
#
#   build-launcher.sh TRITON_NVIDIA_DIRECTORY TARGET
#
# Without a compiler in this stage the target stays empty, and preflight refuses training.compile.
set -eu
triton=$1 target=$2

mkdir -p "$target"
command -v gcc >/dev/null || {
    echo "COMPILER_IMAGE has no gcc: jobs of this image cannot set training.compile" >&2
    exit 0
}
paths="import sysconfig; print(sysconfig.get_paths(scheme='posix_prefix')['include'])"
suffix="import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Stands in for the driver's library, which comes with the node.
echo "int finetune_no_driver;" >"$scratch/driver.c"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$scratch/libcuda.so.1" "$scratch/driver.c"
# As triton/runtime/build.py calls it; linked although nothing of the stand-in is used.
gcc "$triton/driver.c" -O3 -shared -fPIC -Wno-psabi -o "$target/cuda_utils$(python3.11 -c "$suffix")" \
    -Wl,--no-as-needed "-L$scratch" -l:libcuda.so.1 "-I$triton/include" "-I$(python3.11 -c "$paths")"
chmod 0555 "$target"/*
