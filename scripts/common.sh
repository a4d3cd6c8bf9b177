# What scripts/run, scripts/test and scripts/check share: a virtual environment that is made once. Sourced with bash, in the
# repository's root. A stamp tells whether it is up to date, so that a second call costs no time.

say() { printf '%s\n' "$*" >&2; }

# Print the first Python that is new enough and can make virtual environments; KVBATCH_PYTHON overrules the search.
find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
    if [[ -n ${KVBATCH_PYTHON:-} ]]; then candidates=("$KVBATCH_PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "kvbatch needs Python 3.11 or newer with its venv module; tried: ${candidates[*]}"
    say "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: KVBATCH_PYTHON=/path/to/python $0"
    return 1
}

# ensure_environment EXTRA: install the project, with `all` that it can do or with what `test` needs besides, into .venv
# unless the stamp says it is done.
ensure_environment() {
    local extra=$1 stamp=.venv/.installed-$1 wanted
    # The path counts too: a virtual environment does not survive a move of its folder.
    wanted=$({ cat pyproject.toml constraints.txt && pwd; } | cksum)
    if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi

    if [[ ! -f .venv/.made || $(<.venv/.made) != "$PWD" || ! -x .venv/bin/python ]]; then
        local python
        python=$(find_python) || return
        "$python" -m venv --clear .venv || return
        printf '%s\n' "$PWD" >.venv/.made
    fi
    local log=.venv/install.log start=$SECONDS
    printf 'Installing kvbatch and what it needs into .venv (once; a few minutes) … ' >&2
    if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input \
        --constraint constraints.txt --editable ".[$extra]" >"$log" 2>&1; then
        say "failed:"
        tail -n 15 "$log" >&2
        say "The whole log is $PWD/$log"
        return 1
    fi
    say "done in $((SECONDS - start)) s"
    printf '%s\n' "$wanted" | tee .venv/.installed-all >"$stamp" # `test` holds `all`
}
