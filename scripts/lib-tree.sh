# shellcheck shell=bash
#
# The base kernel as a git tree, and the series on top of it.
# Sourced after lib.sh, never run.

# --- the base kernel -------------------------------------------------------

# Another suite, through the archive that this machine already uses and with
# lists and caches of its own: nothing of the machine's apt changes.
suite_apt()
{
	local dir=$CACHE/apt/$BASE_SUITE tool=$1
	shift

	"$tool" -q -o Dir::Etc::sourcelist="$dir/sources.list" \
		-o Dir::Etc::sourceparts=/dev/null -o Dir::State="$dir" \
		-o Dir::State::status=/dev/null -o Dir::Cache="$dir/cache" \
		-o APT::Sandbox::User=root -o Acquire::Retries=2 "$@"
}

# SUITE_TYPES: deb, and deb-src for sources.
suite_update()
{
	local dir=$CACHE/apt/$BASE_SUITE uri type

	# shellcheck disable=SC2016 # apt expands them
	uri=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 'Created-By: Packages' |
	      awk -F '|' '$1 == "Debian" && $2 == "Debian" { print $3; exit }')
	[ -n "$uri" ] || { echo "apt on this machine knows no Debian archive (apt-get update?)"; return 1; }
	mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
	for type in ${SUITE_TYPES:-deb}; do
		printf '%s [signed-by=%s] %s %s main\n' "$type" \
			/usr/share/keyrings/debian-archive-keyring.gpg "$uri" "$BASE_SUITE"
	done >"$dir/sources.list"
	suite_apt apt-get --error-on=any update
}

# Download with apt, which checks signature and hash, under a name that holds
# the version.  The final name exists only once the file is whole.
base_download()
{
	local version=$1 tmp=$CACHE/debs/tmp

	rm -rf "$tmp"
	mkdir -p "$tmp"
	cd "$tmp" || return
	suite_apt apt-get download "$BASE_PACKAGE=$version"
	mv ./*.deb "$CACHE/debs/${BASE_PACKAGE}_$version.deb"
	rm -rf "$tmp"
}

# Set BASE_VERSION and BASE_DEB: the newest that the archive offers, or the
# newest cached one where the archive cannot be reached.
get_base()
{
	local cached

	mkdir -p "$CACHE/debs" "$CACHE/log" || die "cannot write below $CACHE"
	BASE_VERSION=
	if suite_update >"$CACHE/log/apt-update.log" 2>&1; then
		BASE_VERSION=$(suite_apt apt-cache policy "$BASE_PACKAGE" |
			       awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }')
		[ -n "$BASE_VERSION" ] ||
			die "suite $BASE_SUITE has no package $BASE_PACKAGE"
	else
		cached=$(find "$CACHE/debs" -name "${BASE_PACKAGE}_*.deb" -printf '%f\n' |
			 sed -e 's/^[^_]*_//' -e 's/\.deb$//' | sort -V | tail -n 1)
		[ -n "$cached" ] ||
			die "cannot reach Debian's archive for $BASE_PACKAGE and none is cached, see $CACHE/log/apt-update.log"
		BASE_VERSION=$cached
		say "cannot reach Debian's archive ($(tail -n 1 "$CACHE/log/apt-update.log"))," \
			"using the cached $BASE_PACKAGE $cached"
	fi

	BASE_DEB=$CACHE/debs/${BASE_PACKAGE}_$BASE_VERSION.deb
	if [ ! -f "$BASE_DEB" ]; then
		need_space 1
		step "$CACHE/log/download.log" "downloading $BASE_PACKAGE $BASE_VERSION" \
			base_download "$BASE_VERSION"
	fi
}

# make_base_tree DIR: git tree with one commit, the unpacked base.
make_base_tree()
{
	local dir=$1 tmp=$1.tmp

	rm -rf "$tmp"
	mkdir -p "$tmp"
	dpkg-deb --fsys-tarfile "$BASE_DEB" |
		tar -xO --wildcards './usr/src/linux-source-*.tar.xz' |
		tar -xJ -C "$tmp" --strip-components 1
	cd "$tmp" || return
	is_kernel_tree . || { echo "$BASE_DEB holds no kernel tree"; return 1; }
	# Debian's .gitignore ignores all that is not packaging, new files too.
	sed -i -e '\,^/\*$,d' -e '\,^!/debian/$,d' .gitignore
	git init -q -b base
	git config gc.auto 0
	# Straight into one pack: ninety thousand loose files take minutes.
	neutral_git -c core.bigFileThreshold=1 -c core.compression=1 add -A -f .
	neutral_git commit -q -m "Linux $(make -s kernelversion) ($BASE_PACKAGE $BASE_VERSION)"
	mv "$tmp" "$dir"
}

is_kernel_tree()
{
	[ -f "$1/Kbuild" ] && [ -f "$1/scripts/checkpatch.pl" ] && [ -d "$1/arch/x86/kvm" ]
}

# git with an identity that is not anybody's, and without anybody's hooks,
# signing keys or templates.
neutral_git()
{
	GIT_AUTHOR_NAME='KVM vPMU series' GIT_AUTHOR_EMAIL=kvm-vpmu@example.org \
	GIT_COMMITTER_NAME='KVM vPMU series' GIT_COMMITTER_EMAIL=kvm-vpmu@example.org \
	git -c commit.gpgSign=false -c core.hooksPath=/dev/null -c core.autocrlf=false \
		-c core.fsmonitor=false "$@"
}

# --- the series ------------------------------------------------------------

# The patch files, one a line, in the order of the file "series".
series_files()
{
	# The first one completes a last line that lacks its end.
	# shellcheck disable=SC1003 # not an escaped quote
	sed -e '$a\' "$TOP/series" |
		sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' -e "s,^,$TOP/patches/,"
}

# apply_series TREE REF BRANCH: point BRANCH at REF plus the series, check it
# out in TREE.  On failure TREE is back at REF and the message names patch
# and hunk.
apply_series()
{
	local tree=$1 ref=$2 branch=$3 patch log

	[ -n "$(series_files)" ] || die "series names no patches"
	log=$(mktemp)
	neutral_git -C "$tree" checkout -q -B "$branch" "$ref" || die "$tree: cannot check out $ref"
	while IFS= read -r patch; do
		[ -f "$patch" ] || die "series names a patch that is not there: ${patch##*/}"
		neutral_git -C "$tree" -c am.threeWay=false am -q --no-3way \
			--committer-date-is-author-date "$patch" >"$log" 2>&1 </dev/null &&
			continue

		say "patch does not apply: ${patch##*/}"
		grep '^error:' "$log" | sed 's/^/    /' >&2
		failing_hunks "$log" "$patch" | sed 's/^/    /' >&2
		git -C "$tree" am --abort 2>/dev/null
		git -C "$tree" reset -q --hard "$ref"
		rm -f "$log"
		return 1
	done < <(series_files)
	rm -f "$log"
}

# git am says "patch failed: FILE:LINE"; print the hunk of FILE that starts there.
failing_hunks()
{
	sed -n 's/^error: patch failed: \(.*\):\([0-9]*\)$/\1 \2/p' "$1" |
	while read -r file line; do
		awk -v file="$file" -v line="$line" '
			/^(diff --git|-- )/ { on = 0; here = 0 }
			/^--- a\// { here = substr($0, 7) == file }
			/^@@ / { on = here && index($2 ",", "-" line ",") == 1 }
			on' "$2"
	done
}

# check_user_tree PATH REF: is it a kernel clone, clean, with that commit?
check_user_tree()
{
	local out

	[ -d "$1" ] || die "no such folder: $1"
	is_kernel_tree "$1" || die "$1 is not a kernel tree"
	out=$(git -C "$1" rev-parse --git-dir 2>&1) || die "$1 is not a git tree: ${out%%$'\n'*}"
	git -C "$1" rev-parse -q --verify "$2^{commit}" >/dev/null ||
		die "$1 has no commit '$2'"
	[ -z "$(git -C "$1" status --porcelain --untracked-files=no)" ] ||
		die "$1 has uncommitted changes: commit or stash them first"
}

# Set BASE_TREE: the cached git tree of the base that get_base found.  Also what
# selftests/Makefile uses by default.
need_base_tree()
{
	BASE_TREE=$CACHE/tree/$BASE_VERSION
	if [ ! -d "$BASE_TREE" ]; then
		need_space 12
		mkdir -p "$CACHE/tree"
		step "$CACHE/log/unpack.log" "unpacking $BASE_PACKAGE $BASE_VERSION" \
			make_base_tree "$BASE_TREE"
	fi
	ln -sfn "$BASE_TREE" "$CACHE/base"
}
