# Sourced by scripts/test and scripts/quickstart, from the top of the repository.

PDRUN_VENV=${PDRUN_VENV:-build/venv}
PDRUN_PYTHON=$PDRUN_VENV/bin/python

# The program by which a Debian package is known to be there.
program_of() {
    case $1 in
        iproute2) echo ip ;;
        nftables) echo nft ;;
        openssh-client) echo ssh ;;
        openssh-server) echo sshd ;;
        openmpi-bin) echo mpirun.openmpi ;;
        mpich) echo mpirun.mpich ;;
        slurm-client) echo srun ;;
        munge) echo munged ;;
        *) echo "$1" ;;
    esac
}

# Install those Debian packages that are missing, where that is possible; tests that need one skip with a reason without it.
setup_system() {
    local missing=() name
    for name in "$@"; do
        case $name in
            nftables) command -v nft >/dev/null || PATH=$PATH:/usr/sbin command -v nft >/dev/null || missing+=("$name") ;;
            slurm-wlm-basic-plugins) compgen -G '/usr/lib/*/slurm*/auth_munge.so' >/dev/null || missing+=("$name") ;;
            *) PATH=$PATH:/usr/sbin:/sbin command -v "$(program_of "$name")" >/dev/null || missing+=("$name") ;;
        esac
    done
    ((${#missing[@]})) || return 0
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}"
        apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
    else
        echo "not installed: ${missing[*]} (some tests will skip)" >&2
    fi
}

# Make the virtual environment and install pdrun into it, editable, with the extras and packages given.
setup_python() {
    local what=$1
    shift
    [[ -x $PDRUN_PYTHON ]] || python3 -m venv "$PDRUN_VENV"
    # torch comes first and with its version: another package's open range could pull a build with CUDA, gigabytes large.
    # pip would compile 13,000 modules in one process, most of which nobody imports: what is not compiled here is when it is
    # first imported.
    if ! "$PDRUN_PYTHON" -c 'import torch' 2>/dev/null; then
        quietly "$PDRUN_PYTHON" -m pip install --no-compile "torch==${PDRUN_TORCH:-2.13.0}" numpy
        # Beside what follows. torch has a file for later versions of Python: that it cannot be compiled is no matter.
        "$PDRUN_PYTHON" -m compileall -qq -j 0 -x "$UNUSED_MODULES" "$PDRUN_VENV"/lib/python3*/site-packages/{torch,sympy} \
            >/dev/null 2>&1 &
    fi
    install_by_uv -e "$what" "$@" || quietly "$PDRUN_PYTHON" -m pip install --no-compile -e "$what" "$@"
}

# uv takes a sixth of pip's CPU time (5 s of 33). It reads none of pip's settings: where pip has an index of its own, or uv
# fails, pip does it.
install_by_uv() {
    local certificates=${SSL_CERT_FILE:-${PIP_CERT:-}}
    [[ -z ${PIP_INDEX_URL:-} ]] || return 1
    ! "$PDRUN_PYTHON" -m pip config list 2>/dev/null | grep -qE '\.index.url=' || return 1
    "$PDRUN_PYTHON" -m pip install -q --no-compile uv >/dev/null 2>&1 || return 1
    env ${certificates:+SSL_CERT_FILE="$certificates"} "$PDRUN_VENV/bin/uv" pip install -q --python "$PDRUN_PYTHON" "$@" \
        >/dev/null 2>&1
}

# Modules of torch and sympy that no test imports.
UNUSED_MODULES='/(tests|testing|benchmark|physics|combinatorics|crypto|stats|vector|holonomic)/'

# Show the output of a command only when it fails.
quietly() {
    local log
    log=$(mktemp)
    if "$@" >"$log" 2>&1; then rm -f "$log"; else cat "$log" >&2; rm -f "$log"; return 1; fi
}
