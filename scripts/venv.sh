# Sourced by scripts/serve and scripts/test, which run in the repository's root: makes .venv and keeps it up to date.

VENV=.venv

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The first interpreter on the path that is new enough; PYTHON=… chooses another.
find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11)
    [[ -n ${PYTHON:-} ]] && candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; tried ${candidates[*]}. Install one, or name it: PYTHON=/path/to/python3 $0"
}

make_venv() {
    # An interrupted earlier start can leave a folder without a working pip.
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"
    say "Making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check "$@"
}

# Like pip_install, without translating modules, of which most are never imported: with uv where it can be installed, in
# a third of the time.
quick_install() {
    if pip_install 'uv==0.13.9' && "$VENV/bin/python" scripts/uv_install.py "$@"; then return; fi
    say "Without uv: see above"
    pip_install --no-compile "$@"
}

# prepare_venv EXTRA [INSTALL]: installs the package with EXTRA ("" or "test") at the pinned versions, by one of the
# functions above, unless that was done for this very place, pyproject.toml and constraints. A second start therefore
# needs neither time nor network.
prepare_venv() {
    local extra=$1 install=${2:-pip_install} stamp=$VENV/.caraserve want have=""
    local pins=(scripts/constraints.txt scripts/constraints-cuda13.txt)
    want="$PWD $(cat pyproject.toml "${pins[@]}" | cksum)"
    [[ -x $VENV/bin/caraserve && -f $stamp ]] && have=$(<"$stamp")
    [[ $have == "$want $extra" || $have == "$want test" ]] && return
    make_venv
    say "Installing the pinned packages into $VENV (once; some minutes on a slow link)"
    "$install" "${pins[@]/#/--constraint=}" --editable ".${extra:+[$extra]}"
    echo "$want $extra" >"$stamp"
}
