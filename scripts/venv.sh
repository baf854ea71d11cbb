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

# prepare_venv EXTRA [OPTIONS OF PIP]: installs the package with EXTRA ("" or "test") at the pinned versions, unless that
# was done for this very place, pyproject.toml and constraints. A second start therefore needs neither time nor network.
prepare_venv() {
    local extra=$1 options=("${@:2}") stamp=$VENV/.caraserve want have=""
    local pins=(scripts/constraints.txt scripts/constraints-cuda13.txt)
    want="$PWD $(cat pyproject.toml "${pins[@]}" | cksum)"
    [[ -x $VENV/bin/caraserve && -f $stamp ]] && have=$(<"$stamp")
    [[ $have == "$want $extra" || $have == "$want test" ]] && return
    make_venv
    say "Installing the pinned packages into $VENV (once; some minutes on a slow link)"
    "$VENV/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check \
        "${pins[@]/#/--constraint=}" "${options[@]}" --editable ".${extra:+[$extra]}"
    echo "$want $extra" >"$stamp"
}
