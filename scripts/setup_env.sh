# Sets up .venv on the first run, or says what is missing and how to get it, and exits with 1.
#
#   bash scripts/setup_env.sh           the package, editable, and what developers need
#   bash scripts/setup_env.sh --rivals  also what benchmarks compare with: constraints/rivals.txt,
#                                       1.3 GB, on a machine with an NVIDIA driver; afterwards
#                                       .venv/bin/python -m benchmarks.sm90
#
# quickstart.sh, test.sh and device_check.sh source it: `root` is the checkout, `python` the
# interpreter of .venv, and setup_env sets it up. `setup_env tested` and `setup_env newest` set up
# .venv-libraries and .venv-newest, with the libraries of constraints/libraries.txt as well.
#
# A different Python:  rm -rf .venv; PYTHON=/path/to/python3.12 bash scripts/test.sh
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) are respected.

root=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) # CDPATH: elsewhere, and it prints
venv="$root/.venv"
python="$venv/bin/python"

OLDEST_PYTHON="3.10"
CPU_GIB=3   # free space for the environment with a CPU build of torch
CUDA_GIB=12 # and with a CUDA build and its libraries

setup_env() { # none, tested or newest: which libraries beside the package
  libraries=${1:-none}
  case $libraries in
    tested) venv="$root/.venv-libraries" ;;
    newest) venv="$root/.venv-newest" ;;
  esac
  python="$venv/bin/python"
  [ "$(uname -s)" = Linux ] || fail "this is $(uname -s)" "Linux" "use a Linux machine or a container"
  if driver_found; then has_driver=yes; else has_driver=no; fi
  local stamp="$venv/.set-up" inputs
  inputs=$(environment_inputs)
  if [ "$libraries" != newest ] && [ -x "$python" ] &&
    [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
    return
  fi
  rm -f "$stamp"
  local gib=$CPU_GIB constraints=(-c constraints/tested.txt)
  if [ "$has_driver" = yes ]; then gib=$CUDA_GIB; else constraints+=(-c constraints/cpu.txt); fi
  make_venv "$gib"
  if [ "$has_driver" = yes ]; then remove_cpu_torch; fi
  say "installing into ${venv##*/} (NVIDIA driver: $has_driver); the first time takes minutes"
  # editable installs from pyproject.toml came with pip 21.3; new virtual environments may have less
  if ! (cd "$root" && "$python" -m pip install "pip>=23" &&
    "$python" -m pip install "${constraints[@]}" -e ".[compile,test,dev]"); then
    fail "pip could not install what pyproject.toml lists ($(free_gib "$root") GiB free in $root)" \
      "the packages and room for them" \
      "read pip's last lines above; behind a mirror set PIP_INDEX_URL; then run this again"
  fi
  if [ "$libraries" != none ]; then setup_libraries "${constraints[@]}"; fi
  local versions
  versions=$("$python" -c 'if True:
    import torch, tilelang
    print(f"torch {torch.__version__}, tilelang {tilelang.__version__}")') ||
    fail "torch or tilelang does not import" "both" "read the error above; rm -r $venv; run this again"
  echo "$inputs" >"$stamp"
  say "done: $versions in ${venv##*/}"
}

# Constraints keep torch as it is; with `newest` transformers and the libraries have no pins. veRL
# comes without what it requires: it pins transformers to older releases than TRL runs with. FLA
# lies in a folder of its own, or transformers would run its kernels, which need a GPU; and so does
# Megatron-Core, whose layers need FLA. It has wheels for Python 3.12 and later alone.
setup_libraries() { # constraints for pip
  local list="$root/constraints/libraries.txt" wanted verl fla megatron
  wanted=$(grep -v "^#" "$list")
  if [ "$libraries" = newest ]; then
    shift 2 # -c constraints/tested.txt
    wanted="transformers accelerate peft $(sed "s/==.*//" <<<"$wanted")"
  fi
  wanted=$(tr " " "\n" <<<"$wanted")
  verl=$(grep "^verl" <<<"$wanted")
  fla=$(grep "^fla-core\|^triton" <<<"$wanted")
  megatron=$(grep "^megatron-core" <<<"$wanted")
  wanted=$(grep -v "^verl\|^fla-core\|^triton\|^megatron-core" <<<"$wanted")
  # shellcheck disable=SC2086
  (cd "$root" && "$python" -m pip install --upgrade "$@" $wanted &&
    "$python" -m pip install --upgrade --no-deps $verl &&
    "$python" -m pip install --upgrade --no-deps --target "$venv/fla" $fla &&
    "$python" -m pip install --upgrade --no-deps --target "$venv/fla" \
      --only-binary=:all: --python-version 3.12 --ignore-requires-python $megatron) ||
    fail "pip could not install constraints/libraries.txt" "the packages and room for them" \
      "read pip's last lines above; then run this again"
}

# Changes when the environment has to be brought up to date; that of `newest` always has to.
environment_inputs() {
  (cd "$root" && cat pyproject.toml constraints/*.txt scripts/setup_env.sh | sha256sum | cut -c1-16)
  echo "$root, driver: $has_driver"
}

driver_found() {
  [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1
}

make_venv() { # GiB that must be free
  local found free
  if [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1; then return; fi
  found=$(find_python) || exit 1
  "$found" -c "import venv, ensurepip" 2>/dev/null ||
    fail "$found has no venv module" "venv and ensurepip" \
      "on Debian or Ubuntu: sudo apt install python3-venv (or python3.X-venv)"
  free=$(free_gib "$root")
  [ "$free" -ge "$1" ] ||
    fail "$free GiB free in $root" "$1 GiB for ${venv##*/}" "free some space, or clone onto a larger disk"
  say "creating ${venv##*/} with $found"
  "$found" -m venv --clear "$venv" ||
    fail "$found could not create $venv" "a writable folder" "read the error above"
}

# A build without CUDA satisfies pyproject.toml and would stay: .venv was made where no driver was.
remove_cpu_torch() {
  if "$python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
    "$python" -m pip uninstall --yes torch
  fi
}

# The first interpreter that is new enough: $PYTHON, or python3, or a versioned name.
find_python() {
  local candidate version seen=() names=(python3 python3.13 python3.12 python3.11 python3.10 python)
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  for candidate in "${names[@]}"; do
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    if [ "$(printf '%s\n' "$OLDEST_PYTHON" "$version" | sort -V | head -n1)" = "$OLDEST_PYTHON" ]; then
      command -v "$candidate"
      return
    fi
    seen+=("$candidate is $version")
  done
  local got="no ${PYTHON:-Python} found"
  [ ${#seen[@]} = 0 ] || got=$(printf '%s, ' "${seen[@]}")
  fail "${got%, }" "Python $OLDEST_PYTHON or newer" \
    "install one (Debian, Ubuntu: sudo apt install python3 python3-venv), or set PYTHON=/path/to/python3"
}

free_gib() {
  df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'
}

say() { echo "set-up: $*" >&2; }

fail() { # what we got, what is needed, how to get there
  say "$1; need $2; $3"
  exit 1
}

# Libraries that run on GPUs only, in the versions of the records: constraints/rivals.txt.
setup_rivals() {
  [ "$has_driver" = yes ] ||
    fail "no NVIDIA driver here" "a GPU, which the libraries to compare with run on" "leave --rivals out"
  say "installing what benchmarks compare with: constraints/rivals.txt"
  (cd "$root" && "$python" -m pip install -c constraints/tested.txt -r constraints/rivals.txt) ||
    fail "pip could not install constraints/rivals.txt" "the packages and room for them" \
      "read pip's last lines above; benchmarks run without those that are missing"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # not sourced
  set -euo pipefail
  case "$*" in
    "" | --rivals) ;;
    -h | --help)
      while IFS= read -r line && [ "${line:0:1}" = "#" ]; do echo "${line:2}"; done <"$0"
      exit
      ;;
    *) fail "setup_env.sh $*" "--rivals, --help or nothing" "leave the rest out" ;;
  esac
  setup_env
  [ $# = 0 ] || setup_rivals
fi
