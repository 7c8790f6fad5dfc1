// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a guest gets exact counts of what the CPU executes natively
 *
 * Count code of known length with the counters of an AMD vCPU: instructions and
 * branches have to be exact, with and without VM-Exits in between, and a
 * counter has to interrupt once, where it overflows.
 *
 * That's for the test bed whose emulated CPU has a PMU.  The counts are exact
 * there, but for VMRUN, which counts for the guest: the least of some repeats is
 * without the host's interrupts.
 */
#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

#define APIC_LVTPC	0x340

#define COUNTER_MASK	(BIT_ULL(48) - 1)

#define CTRL		(ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_USR |	\
			 ARCH_PERFMON_EVENTSEL_ENABLE)

#define NR_REPEATS	5

/* Where string instructions leave their data. */
u8 guest_buffer[PAGE_SIZE];

/* Define a snippet; it may clobber what a function may. */
#define SNIPPET(name, body) extern u8 snippet_##name[];			\
asm(".pushsection .text\n\t"						\
	"snippet_" #name ":\n\t"					\
	body "\n\t"							\
	"ret\n\t"							\
	".popsection")

SNIPPET(empty, "");
SNIPPET(nop, "nop");
SNIPPET(loop, "mov $1000, %eax; 1: nop; dec %eax; jnz 1b");
SNIPPET(long_loop, "mov $10000, %eax; 1: dec %eax; jnz 1b");
SNIPPET(rep, "lea guest_buffer(%rip), %rdi; mov $1000, %ecx; rep stosb");
SNIPPET(call, "call 1f; jmp 2f; 1: ret; 2:");
SNIPPET(cpuid, "push %rbx; mov $100, %esi; 1: xor %eax, %eax; cpuid; dec %esi; jnz 1b; pop %rbx");

static const struct {
	const char *name;
	const u8 *snippet;
	u64 nr_insns, nr_branches;

	/* What VMRUN may add to both. */
	u64 nr_exits;
} cases[] = {
	{ "NOP", snippet_nop, 1, 0 },
	{ "loop", snippet_loop, 3001, 1000 },
	{ "long loop", snippet_long_loop, 20001, 10000 },
	{ "REP STOS", snippet_rep, 3, 0 },
	{ "CALL, RET, JMP", snippet_call, 3, 3 },

	/* KVM counts the ones that it emulates. */
	{ "CPUIDs", snippet_cpuid, 403, 100, 100 },
};

/* Counter 0 counts instructions, counter 1 counts branches. */
static u64 read_counter(u32 index)
{
	u32 eax, edx;

	asm volatile("lfence\n\trdpmc" : "=a" (eax), "=d" (edx) : "c" (index) : "memory");
	return eax | (u64)edx << 32;
}

static noinline u64 measure(u32 index, const u8 *snippet)
{
	u64 least = -1ull, before;
	int i;

	for (i = 0; i < NR_REPEATS; i++) {
		before = read_counter(index);
		/* Skip what the compiler may keep below RSP. */
		asm volatile("sub $128, %%rsp\n\t"
			     "call *%[snippet]\n\t"
			     "add $128, %%rsp"
			     : : [snippet] "r" (snippet)
			     : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11",
			       "memory", "cc");
		least = min(least, (read_counter(index) - before) & COUNTER_MASK);
	}
	return least;
}

static void guest_counts(void)
{
	u64 count;
	int i;

	wrmsr(MSR_K7_EVNTSEL0, CTRL | AMD_ZEN_INSTRUCTIONS_RETIRED);
	wrmsr(MSR_K7_EVNTSEL1, CTRL | AMD_ZEN_BRANCHES_RETIRED);

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		count = measure(0, cases[i].snippet) - measure(0, snippet_empty);
		__GUEST_ASSERT(count - cases[i].nr_insns <= cases[i].nr_exits,
			       "%s: wanted %lu instructions, got %lu",
			       cases[i].name, cases[i].nr_insns, count);

		count = measure(1, cases[i].snippet) - measure(1, snippet_empty);
		__GUEST_ASSERT(count - cases[i].nr_branches <= cases[i].nr_exits,
			       "%s: wanted %lu branches, got %lu",
			       cases[i].name, cases[i].nr_branches, count);
	}
}

static u64 guest_nr_nmis, guest_nmi_rip;

static void guest_nmi_handler(struct ex_regs *regs)
{
	wrmsr(MSR_K7_EVNTSEL0, 0);
	guest_nmi_rip = regs->rip;
	guest_nr_nmis++;
}

extern u8 guest_sled[];

/* Not inlined, as it defines a symbol. */
static noinline void guest_overflow(u64 left)
{
	u64 ctrl = CTRL | ARCH_PERFMON_EVENTSEL_INT | AMD_ZEN_INSTRUCTIONS_RETIRED;
	u32 eax = ctrl, edx = ctrl >> 32;
	u64 where;

	guest_nr_nmis = 0;
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);
	wrmsr(MSR_K7_EVNTSEL0, 0);
	wrmsr(MSR_K7_PERFCTR0, -left & COUNTER_MASK);
	asm volatile("wrmsr\n\t"
		     "guest_sled:\n\t"
		     ".rept 2000\n\t"
		     "nop\n\t"
		     ".endr"
		     : : "a" (eax), "d" (edx), "c" (MSR_K7_EVNTSEL0) : "memory");
	wrmsr(MSR_K7_EVNTSEL0, 0);

	__GUEST_ASSERT(guest_nr_nmis == 1, "%lu left: wanted 1 NMI, got %lu",
		       left, guest_nr_nmis);

	/*
	 * The WRMSR exits, as does the overflow: WRMSR itself, if KVM counts it,
	 * and the VMRUN behind it are counted before the first NOP.  So is one
	 * VMRUN for each time that perf interrupts the guest for KVM to check on
	 * the counter, which happens no more than a handful of times.
	 */
	where = guest_nmi_rip - (u64)guest_sled;
	__GUEST_ASSERT(where <= left && where + 2 + 4 >= left,
		       "%lu left: wanted the NMI after %lu NOPs, got it after %lu",
		       left, left, where);
}

static void guest_code(void)
{
	guest_counts();

	x2apic_enable();
	guest_overflow(10);
	guest_overflow(100);
	guest_overflow(1000);
	guest_overflow(1999);
	GUEST_DONE();
}

/* Does the CPU count anything by itself? */
static void guest_probe(void)
{
	u64 before;

	wrmsr(MSR_K7_EVNTSEL0, CTRL | AMD_ZEN_INSTRUCTIONS_RETIRED);
	before = rdmsr(MSR_K7_PERFCTR0);
	asm volatile("mov $1000, %%eax\n\t1: dec %%eax\n\tjnz 1b" : : : "rax", "cc");
	GUEST_SYNC(rdmsr(MSR_K7_PERFCTR0) - before);
	GUEST_DONE();
}

static bool counts_native(void)
{
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	struct ucall uc;
	bool r;

	vm = vm_create_with_one_vcpu(&vcpu, guest_probe);
	vcpu_run(vcpu);
	TEST_ASSERT_EQ(get_ucall(vcpu, &uc), UCALL_SYNC);
	r = uc.args[1] >= 1000;
	kvm_vm_free(vm);
	return r;
}

int main(void)
{
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	struct ucall uc;

	TEST_REQUIRE(host_cpu_is_amd_compatible);
	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(counts_native());

	vm = vm_create_with_one_vcpu(&vcpu, guest_code);
	vm_install_exception_handler(vm, NMI_VECTOR, guest_nmi_handler);
	vcpu_run(vcpu);
	switch (get_ucall(vcpu, &uc)) {
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	case UCALL_DONE:
		break;
	default:
		TEST_FAIL("Unexpected exit reason: %s",
			  exit_reason_str(vcpu->run->exit_reason));
	}
	kvm_vm_free(vm);
	return 0;
}
