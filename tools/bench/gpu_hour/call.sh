#!/usr/bin/env bash
# One call on the GPU machine: takes in what was carried, then runs the next stages that fit the time.
#   bash tools/bench/gpu_hour/call.sh RESULTS MINUTES [ARGUMENTS OF run]
# RESULTS: folder that comes back. CARRIED (default .gpu_hour): earlier results, and pieces of kit.* and site.*;
# pieces are kept in WORK (default /tmp/gpu_hour) from call to call. Nothing is installed. For a trial, PYTHON names
# another Python, and GPU_HOUR_FLAGS holds flags that come before `run`.
set -u
results=$1 minutes=$2
shift 2
began=$SECONDS carried=${CARRIED:-.gpu_hour} work=${WORK:-/tmp/gpu_hour}
mkdir -p "$work/pieces" "$work/package" "$results"
for file in "$carried"/*; do
  case "$file" in
    *'/*') ;; # nothing was carried
    */kit.* | */site.*) cp -n "$file" "$work/pieces/" ;;
    *) [ -f "$file" ] && cp "$file" "$results/" ;;
  esac
done
# The package with its two folders from the top of the repository, and a version, as an installation would have it.
rm -rf "$work/package"/*
cp -r smcp_fx "$work/package/" && cp -r passes backends "$work/package/smcp_fx/"
info=$work/package/smcp_fx-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml).dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: smcp_fx\nVersion: %s\n' "$(basename "$info" .dist-info | cut -d- -f2)" >"$info/METADATA"
# The last piece is named .last: then we know how many there are.
unpack() { # unpack NAME: the pieces NAME.* into WORK/NAME, once all of them are here
  local last have wanted
  last=$(compgen -G "$work/pieces/$1.*.last") || return 0
  [ -e "$work/$1/whole" ] && return 0
  have=$(ls "$work/pieces/$1".* | wc -l) wanted=$((10#$(basename "$last" | cut -d. -f2) + 1))
  [ "$have" -eq "$wanted" ] || { echo "call.sh: $have of $wanted pieces of $1 are here"; return 0; }
  mkdir -p "$work/$1"
  cat "$work/pieces/$1".* | xz -dc -T0 | tar -xf - -C "$work/$1" && touch "$work/$1/whole"
}
unpack site
unpack kit
own=()
if [ -e "$work/kit/whole" ]; then
  kit=$work/kit
  export TRT_PYTHON="env LD_LIBRARY_PATH=$kit/stubs:$kit/site/tensorrt:$kit/lib PYTHONHOME=$kit PYTHONPATH=$kit/site $kit/bin/python3.10"
  own=(--no-library-tactics)
fi
export PYTHONPATH=$work/package:$PWD/tools/bench:$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export PYTHONSAFEPATH=1 # or the repository itself would come first, whose package lacks two folders
python=${PYTHON:-python3}
"$python" - <<'PY'
import importlib.util
needed = "torch torchvision networkx numpy scipy safetensors rich onnx onnxscript onnx_ir onnxruntime".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
print("call.sh: missing packages:", ", ".join(missing) or "none")
PY
left=$("$python" -c "print(max($minutes - ($SECONDS - $began) / 60, 0.0))")
# Folders that come back hold files alone; what is written to the results is there even if the call is cut.
"$python" -m gpu_hour --state "$results" "${own[@]+"${own[@]}"}" ${GPU_HOUR_FLAGS:-} run --minutes "$left" "$@" 2>&1 | tee -a "$results/log.txt"
