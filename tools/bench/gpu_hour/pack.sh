#!/usr/bin/env bash
# Packs what the GPU machine lacks into pieces of at most 52 MiB (58 with a small working tree; see README.md).
#   pack.sh kit OUT                       TensorRT 8.5.3.1 and a Python 3.10 that runs it: OUT/kit.00 ... kit.NN.last
#   pack.sh site OUT NAME==VERSION ...    wheels for its Python 3.12, unpacked: OUT/site.00 ... site.NN.last
# Needs pip, xz; for the kit also pyenv's Python 3.10 (or PYTHON310_PREFIX=...), gcc, readelf and ten minutes.
set -euo pipefail
kind=${1:?usage: pack.sh kit|site OUT [NAME==VERSION ...]} out=${2:?usage: pack.sh kit|site OUT [NAME==VERSION ...]}
shift 2
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # fetch PYTHON NAME==VERSION: a wheel for Linux on x86-64, without what it needs
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$1" --implementation cp \
    $(for glibc in 2_17 2_24 2_27 2_28 2_31 2_34; do echo "--platform manylinux_${glibc}_x86_64"; done) \
    --platform manylinux2014_x86_64 -d "$work/wheels" "$2"
}
pieces() { # pieces FOLDER NAME: a folder as NAME.00, NAME.01, ..., the last one named so
  tar -C "$1" -cf - . | xz -T0 "-${XZ_LEVEL:-6}" | split -b 52M -d - "$out/$2."
  local last
  last=$(ls "$out/$2".* | tail -n 1)
  mv "$last" "$last.last"
  ls -la "$out"
}

mkdir -p "$work/wheels" "$work/tree/site"
if [ "$kind" = site ]; then
  for wanted in "$@"; do fetch 3.12 "$wanted"; done
  for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/tree/site"; done
  pieces "$work/tree/site" site
  exit
fi
prefix=${PYTHON310_PREFIX:-$(ls -d "$(pyenv root)"/versions/3.10.* | tail -n 1)}
for wanted in tensorrt==8.5.3.1 numpy==2.2.6 cuda-bindings==13.4.4 cuda-pathfinder==1.8.3; do fetch 3.10 "$wanted"; done
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/tree/site"; done

# libnvinfer_plugin links cuBLAS 11 and cuDNN 8 for its plugins alone, which a CNN does not use. These stubs satisfy
# the loader without a gigabyte of libraries; engines are built with those tactic sources off.
python3 - "$work/tree/site/tensorrt" "$work/tree/stubs" <<'PY'
import collections, pathlib, subprocess, sys
libraries, stubs = map(pathlib.Path, sys.argv[1:])
stubs.mkdir(parents=True)
command = ["readelf", "-W", "--dyn-syms", libraries / "libnvinfer_plugin.so.8"]
wanted = collections.defaultdict(set)
for row in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
    cells = row.split()
    if len(cells) < 8 or cells[6] != "UND":
        continue
    name, _, version = cells[7].partition("@")
    owner = version.lstrip("@") if version.startswith(("libcu", "@libcu")) else None
    if owner is None and name.startswith("cudnn"):
        owner = "libcudnn.so.8"
    if owner:
        wanted[owner].add(name)
for owner, names in wanted.items():
    source, script = stubs / "stub.c", stubs / "stub.map"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names)))
    script.write_text(f"{owner} {{ global: *; }};\n")
    link = ["gcc", "-shared", "-fPIC", "-o", stubs / owner, f"-Wl,-soname,{owner}", f"-Wl,--version-script={script}"]
    subprocess.check_call([*link, source])
PY
rm -f "$work"/tree/stubs/stub.*
tar --exclude='*/test' --exclude='*/tests' --exclude='*.a' --exclude='*/idlelib' --exclude='*/tkinter' \
  --exclude='__pycache__' --exclude='*/ensurepip' --exclude='site-packages/*' --exclude='*/config-3.10*' \
  -C "$prefix" -cf - bin lib | tar -xf - -C "$work/tree"
pieces "$work/tree" kit
