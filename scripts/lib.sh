# shellcheck shell=bash
#
# What the scripts share: messages, the cache and its lock, packages.
# Sourced, never run.
# shellcheck disable=SC2034 # variables that only the scripts use

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${KVM_VPMU_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/kvm-vpmu}
BASE_PACKAGE=${BASE_PACKAGE:-linux-source-7.3}
BASE_SUITE=${BASE_SUITE:-trixie-backports}
JOBS=${JOBS:-$(nproc)}

# Nothing that is sorted, parsed or measured may depend on the user's locale.
export LC_ALL=C

say()
{
	printf '%s\n' "$*" >&2
}

die()
{
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# bad_usage MESSAGE: for wrong words on the command line.
bad_usage()
{
	printf '%s: %s (see --help)\n' "${0##*/}" "$*" >&2
	exit 2
}

# step LOG TEXT COMMAND...: run one long step, its output in LOG.
step()
{
	local log=$1 text=$2 start=$SECONDS rc=0
	shift 2

	mkdir -p "$(dirname "$log")" || die "cannot write below $CACHE"
	printf '%s ... (log: %s)\n' "$text" "$log" >&2
	# In the background, so that a signal is not held up until it ends, and
	# in a process group, so that all of it ends then.
	set -m
	( set -e; "$@" ) >"$log" 2>&1 </dev/null &
	STEP_PID=$!
	set +m
	wait "$STEP_PID" || rc=$?
	STEP_PID=
	if [ $rc -ne 0 ]; then
		tail -n 15 "$log" | sed 's/^/    /' >&2
		die "$text: failed after $((SECONDS - start)) s, see $log"
	fi
	printf '%s: done in %d s\n' "$text" $((SECONDS - start)) >&2
}

STEP_PID=
on_signal()
{
	[ -z "$STEP_PID" ] || kill -TERM -- "-$STEP_PID" 2>/dev/null || true
	jobs -p | xargs -r kill -TERM 2>/dev/null || true
	wait
	exit "$1"
}
trap 'on_signal 130' INT
trap 'on_signal 143' TERM

# --- the cache -------------------------------------------------------------

# Take the cache for this process and its children.  A second run waits.
lock_cache()
{
	[ -z "${KVM_VPMU_LOCKED:-}" ] || return 0

	case $CACHE in
	/*) ;;
	*) die "KVM_VPMU_CACHE must be an absolute path, not '$CACHE'" ;;
	esac
	case $CACHE in
	*[[:space:]:]*) die "no blanks or colons in the cache's path, make cannot cope: '$CACHE'" ;;
	esac
	case $TOP in
	*[[:space:]:]*) die "no blanks or colons in the path of this repository, make cannot cope: '$TOP'" ;;
	esac
	mkdir -p "$CACHE" 2>/dev/null && [ -w "$CACHE" ] ||
		die "cannot write the cache folder $CACHE (set KVM_VPMU_CACHE)"
	exec 9>"$CACHE/lock" || die "cannot write $CACHE/lock"
	if ! flock -n 9; then
		say "another run uses $CACHE, waiting for it"
		flock 9
	fi
	export KVM_VPMU_LOCKED=1
}

# need_space GIB: stop early rather than with a half-written tree.
need_space()
{
	local free

	free=$(df -Pk "$CACHE" | awk 'NR == 2 { print int($4 / 1048576) }')
	[ "$free" -ge "$1" ] ||
		die "$CACHE has $free GiB free, $1 are needed (set KVM_VPMU_CACHE)"
}

# --- packages --------------------------------------------------------------

# Everything comes from the default suites of Debian 12.
PKGS_TREE="git make xz-utils ca-certificates"
PKGS_BUILD="gcc make libc6-dev bc bison flex libelf-dev libssl-dev kmod perl python3 rsync ccache"
PKGS_BOOT="qemu-system-x86 seabios bochs bochs-term bochsbios vgabios grub-common grub-pc-bin xorriso mtools busybox-static bsdutils"
PKGS_QEMU="gcc ccache git xz-utils bzip2 ninja-build pkg-config python3-venv zlib1g-dev libglib2.0-dev libfdt-dev libpixman-1-dev qemu-system-x86 seabios"
PKGS_CHECK="shellcheck sparse codespell python3-ply python3-git"

# need_packages PACKAGE...: install what is missing, as root; else say how.
need_packages()
{
	local p missing=

	command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
		die "this needs Debian 12 or a derivative (no dpkg or apt here)"
	for p in "$@"; do
		[ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] ||
			missing="$missing $p"
	done
	[ -n "$missing" ] || return 0

	if [ "$(id -u)" -ne 0 ]; then
		say "missing packages; as root:"
		say "    apt-get install --no-install-recommends$missing"
		die "cannot install packages without root"
	fi
	# shellcheck disable=SC2086 # a list of names
	step "$CACHE/log/packages.log" "installing$missing" apt_install $missing
}

apt_install()
{
	export DEBIAN_FRONTEND=noninteractive

	apt-get -q install -y --no-install-recommends "$@" ||
	{ apt-get -q update && apt-get -q install -y --no-install-recommends "$@"; }
}

# What --help of the scripts says about the environment.
usage_environment()
{
	cat <<EOF
Environment:
  KVM_VPMU_CACHE  folder for everything that is downloaded or built
                  (now $CACHE)
  BASE_PACKAGE    Debian package with the base kernel (now $BASE_PACKAGE)
  BASE_SUITE      Debian suite that has it (now $BASE_SUITE)
  JOBS            parallel jobs of make (now $JOBS)
EOF
}
