# shellcheck shell=bash
#
# Builds kernels, softpmu and selftests for the test beds, below
# $CACHE/build/TREE-NAME.  Sourced after lib.sh and lib-tree.sh, never run.
#
# All kernels of a tree are built from one work tree that is switched between
# the branches "base" and "series": only the files that differ get new times,
# so that a second kernel costs an incremental build.

# use_tree NAME TREE: what the functions below work on.
use_tree()
{
	TREE=$2
	BUILD=$CACHE/build/$1
	mkdir -p "$BUILD" || die "cannot write $BUILD"
}

# use_base_tree: the base package.  BASE_LABEL is what tables print.
use_base_tree()
{
	get_base
	need_base_tree
	use_tree "$BASE_VERSION" "$BASE_TREE"
	BASE_LABEL=$BASE_VERSION
}

# use_user_tree PATH REF: the same from somebody's clone.  It is only read: the
# work tree is a clone of its own that borrows the objects.
use_user_tree()
{
	local path name ref

	check_user_tree "$1" "$2"
	path=$(cd "$1" && pwd -P)
	ref=$(git -C "$path" rev-parse --verify -q "$2^{commit}")
	name=user-$(printf '%s\n' "$path" | cksum | cut -d ' ' -f 1)
	if [ ! -d "$CACHE/tree/$name" ]; then
		need_space 12
		mkdir -p "$CACHE/tree"
		step "$CACHE/log/clone.log" "borrowing $path" clone_user_tree "$path" "$CACHE/tree/$name"
	fi
	use_tree "$name" "$CACHE/tree/$name"
	rm -f "$TREE/.git/index.lock"
	git -C "$TREE" am --abort >/dev/null 2>&1 || true
	neutral_git -C "$TREE" checkout -q -f -B base "$ref" ||
		die "cannot check out $2 of $path"
	BASE_LABEL=$(git -C "$path" describe --always "$ref" 2>/dev/null)
}

clone_user_tree()
{
	rm -rf "$2.tmp"
	neutral_git clone -q --shared --no-checkout "$1" "$2.tmp"
	git -C "$2.tmp" config gc.auto 0
	mv "$2.tmp" "$2"
}

# Bring the branch "series" up to date with patches/.
use_series()
{
	local want have

	want=$(git -C "$TREE" rev-parse base && series_files | while IFS= read -r f; do cksum <"$f"; done)
	have=$(cat "$TREE/.git/kvm-vpmu-series" 2>/dev/null || true)
	if [ "$want" = "$have" ] && git -C "$TREE" rev-parse -q --verify series >/dev/null; then
		return 0
	fi
	# An interrupted run may have left these; nobody else is in here.
	rm -f "$TREE/.git/kvm-vpmu-series" "$TREE/.git/index.lock"
	git -C "$TREE" am --abort >/dev/null 2>&1 || true
	switch_tree base
	git -C "$TREE" checkout -q --detach
	apply_series "$TREE" base series || die "the series does not apply to $BASE_LABEL"
	printf '%s\n' "$want" >"$TREE/.git/kvm-vpmu-series"
}

# switch_tree REF: nothing but what is in REF; TREE belongs to the cache.
switch_tree()
{
	rm -f "$TREE/.git/index.lock"
	neutral_git -C "$TREE" checkout -q -f "$1" -- || die "$TREE: cannot check out $1"
	git -C "$TREE" clean -fdxq
}

# kmake OUT WORDS...: make for one object tree.  The fixed build stamps make a
# kernel depend on its source and configuration alone.
kmake()
{
	local out=$1
	shift

	PATH=/usr/bin:/bin:/usr/sbin:/sbin CCACHE_DIR=$CACHE/ccache CCACHE_MAXSIZE=3G \
	KBUILD_BUILD_TIMESTAMP='Thu Jan  1 00:00:00 UTC 2026' KBUILD_BUILD_USER=kvm-vpmu \
	KBUILD_BUILD_HOST=example.org KBUILD_BUILD_VERSION=1 \
		make -s -C "$TREE" O="$out" -j"$JOBS" LOCALVERSION= CC="ccache gcc" HOSTCC="ccache gcc" "$@"
}

# fragments CONFIG: the fragments of the configuration "normal" or "debug".
fragments()
{
	local f

	for f in kvm emulator softpmu trim; do
		printf '%s\n' "$TOP/kconfig-fragments/$f.config"
	done
	if [ "$1" = debug ]; then
		printf '%s\n' "$TOP/kconfig-fragments/debug.config"
	fi
}

# configure OUT FRAGMENT...: merge, and insist on every line.  merge_config.sh
# names the lines that did not survive, but does not fail.
configure()
{
	local out=$1 report
	shift

	mkdir -p "$out"
	report=$(cd "$TREE" && scripts/kconfig/merge_config.sh -Q -O "$out" "$@" 2>&1) ||
		{ echo "$report"; return 1; }
	echo "$report"
	if grep -q -e 'Requested value' -e 'not in final' <<<"$report"; then
		echo "some lines of the kconfig fragments did not survive, see above"
		return 1
	fi
}

# Everything that the kernel in an object tree depends on.
kernel_stamp()
{
	git -C "$TREE" rev-parse "$1^{tree}"
	fragments "$2" | xargs cat | cksum
	cat "$TOP"/ci/softpmu/* | cksum
	cksum <"$TOP/scripts/lib-build.sh"
	gcc --version | head -n 1
}

# build_kernel base|series normal|debug: kernel, modules and softpmu.
build_kernel()
{
	local branch=$1 config=$2 out=$BUILD/$1-$2 stamp

	stamp=$(kernel_stamp "$branch" "$config")
	[ "$stamp" != "$(cat "$out/kvm-vpmu.stamp" 2>/dev/null)" ] || return 0
	need_space 4

	# Never trust what an interrupted build left.
	if [ -e "$out/kvm-vpmu.building" ]; then
		rm -rf "$out"
	fi
	switch_tree "$branch"
	step "$CACHE/log/build-$branch-$config.log" "building kernel: $branch, $config" \
		build_kernel_step "$branch" "$config" "$out"
	printf '%s\n' "$stamp" >"$out/kvm-vpmu.stamp"
}

build_kernel_step()
{
	local branch=$1 config=$2 out=$3 other=$BUILD/base-$2

	if [ ! -d "$out" ] && [ "$branch" = series ] && [ -f "$other/kvm-vpmu.stamp" ]; then
		rm -rf "$out.tmp"
		cp -a --reflink=auto "$other" "$out.tmp"
		rm -f "$out.tmp/kvm-vpmu.stamp"
		mv "$out.tmp" "$out"
	fi
	mkdir -p "$out"
	touch "$out/kvm-vpmu.building"
	rm -f "$out/kvm-vpmu.stamp"

	# shellcheck disable=SC2046 # a list of files without blanks
	PATH=/usr/bin:/bin:/usr/sbin:/sbin configure "$out" $(fragments "$config")
	kmake "$out" bzImage modules
	rm -rf "$out/softpmu" "$out/root"
	cp -r "$TOP/ci/softpmu" "$out/softpmu"
	kmake "$out" M="$out/softpmu" modules
	kmake "$out" INSTALL_MOD_PATH="$out/root" modules_install
	kmake "$out" M="$out/softpmu" INSTALL_MOD_PATH="$out/root" modules_install
	rm "$out/kvm-vpmu.building"
}

# The tests of the base that the beds run beside those of the series.
BASE_TESTS="x86/pmu_counters_test x86/pmu_event_filter_test x86/vmx_pmu_caps_test \
x86/svm_pmu_host_guest_test x86/fix_hypercall_test x86/userspace_io_test \
x86/userspace_msr_exit_test x86/msrs_test x86/cpuid_test"

# build_selftests: the project's, the beds' own and BASE_TESTS, all static, in
# $BUILD/selftests.
build_selftests()
{
	switch_tree base
	step "$CACHE/log/build-selftests.log" "building selftests" build_selftests_step
}

build_selftests_step()
{
	make_selftests "$TOP/selftests" "$BUILD/selftests" BASE_TESTS="$BASE_TESTS"
	make_selftests "$TOP/ci/bedtests" "$BUILD/selftests"
}

# make_selftests DIR OUTPUT WORDS...: the tests in DIR/x86, and what WORDS name.
make_selftests()
{
	local dir=$1 output=$2
	shift 2

	PATH=/usr/bin:/bin:/usr/sbin:/sbin make -s -C "$dir" -f "$TOP/selftests/Makefile" \
		-j"$JOBS" KDIR="$TREE" OUTPUT="$output" "$@"
}
