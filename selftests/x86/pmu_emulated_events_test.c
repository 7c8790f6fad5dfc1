// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that KVM counts the instructions and branches that it emulates
 *
 * Verify that each instruction and each branch is counted exactly once if KVM
 * emulates it, be it in the kernel, with the help of userspace, or by means of
 * the instruction emulator, and that it isn't counted if the counter is told
 * not to, or may not.  Verify that a counter which is overflowed by emulated
 * instructions generates exactly one PMI if, and only if, it was asked for.
 *
 * How it works: a snippet of assembly code consists of one or a few emulated
 * instructions.  The guest jumps to the snippet with the counter running, and
 * reads the counter before and after.  The same is done with an empty snippet,
 * and the difference of the two is the number of events in the snippet.  I.e.
 * the result doesn't depend on the CPU counting the instructions that aren't
 * emulated, which may not be the case if KVM itself runs in an emulator.
 */
#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

/* A port and a page that don't belong to any memslot or in-kernel device. */
#define PIO_USER_PORT		0xe000
#define MMIO_USER_GPA		0xd0000000ul
#define MMIO_USER_NR_PAGES	2

/* Edge/level control register of the PIC, and the I/O APIC's index register. */
#define PIO_KERNEL_PORT		0x4d0
#define MMIO_KERNEL_GPA		0xfec00000ul

/* An MSR that KVM doesn't know, and one that exists only in software. */
#define MSR_USER		0x4b564d00
#define MSR_KERNEL		MSR_KVM_POLL_CONTROL

#define APIC_LVTPC		0x340

enum vendor {
	SVM,
	VMX,
	NR_VENDORS,
};

enum counted_event {
	INSTRUCTIONS,
	BRANCHES,
};

static const u64 eventsels[][NR_VENDORS] = {
	[INSTRUCTIONS]	= { AMD_ZEN_INSTRUCTIONS_RETIRED, INTEL_ARCH_INSTRUCTIONS_RETIRED },
	[BRANCHES]	= { AMD_ZEN_BRANCHES_RETIRED, INTEL_ARCH_BRANCHES_RETIRED },
};

static enum vendor vendor;

/* Where string instructions find and leave their data. */
static u8 guest_buffer[2 * PAGE_SIZE];

/* What the guest shall do next, and what came out of it. */
struct guest_run {
	void (*guest_code)(struct guest_run *run);

	/* How to set up and enable the counter. */
	u32 ctrl_msr, counter_msr;
	u32 global_ctrl_msr, global_status_msr, global_clear_msr;
	u64 ctrl, global_ctrl, counter_bit;

	/* Inputs and outputs of guest_measure(). */
	const void *snippet;
	u64 rax, rcx, rdx, rsi, rdi;
	u64 count_before, count_after;

	/* Inputs and outputs of guest_overflow(). */
	u64 preset, nr_insns;
	bool enable_globally;
	u64 value, status, nr_pmis;
};

static struct guest_run guest_run;

/*
 * Define a snippet.  It may clobber RAX, RBX, RCX, RDX, RSI, and RDI, and must
 * neither use the stack nor R14 and R15.
 */
#define SNIPPET(name, body) extern u8 snippet_##name[];			\
asm(".pushsection .text\n\t"						\
	"snippet_" #name ":\n\t"					\
	body "\n\t"							\
	"jmp *%r14\n\t"							\
	".popsection")

SNIPPET(empty, "");
SNIPPET(cpuid, "cpuid");
SNIPPET(cpuid_x3, "cpuid; cpuid; cpuid");
SNIPPET(rdmsr, "rdmsr");
SNIPPET(wrmsr, "wrmsr");
SNIPPET(rdpmc, "rdpmc");
SNIPPET(vmcall, "vmcall");
SNIPPET(vmmcall, "vmmcall");
SNIPPET(patched, ".byte 0xcc, 0xcc, 0xcc");
SNIPPET(wbinvd, "wbinvd");
SNIPPET(invd, "invd");
SNIPPET(in, "in %dx, %al");
SNIPPET(out, "out %al, %dx");
SNIPPET(load, "mov (%rsi), %eax");
SNIPPET(store, "mov %eax, (%rdi)");
SNIPPET(rmw, "add %eax, (%rdi)");
SNIPPET(insb, "insb");
SNIPPET(outsb, "outsb");
SNIPPET(stosl, "stosl");
SNIPPET(movsb, "movsb");
SNIPPET(rep_insb, "rep insb");
SNIPPET(rep_outsb, "rep outsb");
SNIPPET(rep_stosb, "rep stosb");
SNIPPET(rep_stosl, "rep stosl");
SNIPPET(rep_lodsb, "rep lodsb");
SNIPPET(rep_movsb, "rep movsb");
SNIPPET(rep_scasb, "repe scasb");
SNIPPET(fep_add, KVM_FEP "add %rax, %rbx");
SNIPPET(fep_jmp, KVM_FEP "jmp 1f; 1:");
SNIPPET(fep_jmp_x2, KVM_FEP "jmp 1f; 1:" KVM_FEP "jmp 1f; 1:");
SNIPPET(fep_jcc_taken, KVM_FEP "jno 1f; 1:");
SNIPPET(fep_jcc_not_taken, KVM_FEP "jo 1f; 1:");
SNIPPET(fep_loop, KVM_FEP "loop 1f; 1:");
SNIPPET(fep_jrcxz, KVM_FEP "jrcxz 1f; 1:");
SNIPPET(fep_rep_movsb, KVM_FEP "rep movsb");

#define RUN_OFFSET(field) \
	[off_##field] "i" (offsetof(struct guest_run, field))

#define RUN_FIELD(field)	"%c[off_" #field "](%%r15)"

/*
 * Instructions and branches between the two reads of the counter if the snippet
 * is empty.  Besides the first RDMSR, which retires after it has read the
 * counter, these aren't emulated: SHL, OR, and MOV to store the counter, 5 MOVs
 * to load registers, JMP to the snippet and JMP back, MOV to load the index of
 * the counter, and LFENCE so that all of it has retired when it's read again.
 */
#define NR_EMULATED_INSNS	1
#define NR_NATIVE_INSNS		(3 + 5 + 1 + 1 + 1 + 1)
#define NR_NATIVE_BRANCHES	2

static void guest_measure(struct guest_run *run)
{
	asm volatile("mov %%rdi, %%r15\n\t"
		     "lea 1f(%%rip), %%r14\n\t"
		     "mov " RUN_FIELD(counter_msr) ", %%ecx\n\t"
		     "lfence\n\t"
		     "rdmsr\n\t"
		     "shl $32, %%rdx\n\t"
		     "or %%rdx, %%rax\n\t"
		     "mov %%rax, " RUN_FIELD(count_before) "\n\t"
		     "mov " RUN_FIELD(rax) ", %%rax\n\t"
		     "mov " RUN_FIELD(rcx) ", %%rcx\n\t"
		     "mov " RUN_FIELD(rdx) ", %%rdx\n\t"
		     "mov " RUN_FIELD(rsi) ", %%rsi\n\t"
		     "mov " RUN_FIELD(rdi) ", %%rdi\n\t"
		     "jmp *" RUN_FIELD(snippet) "\n\t"
		     "1:\n\t"
		     "mov " RUN_FIELD(counter_msr) ", %%ecx\n\t"
		     "lfence\n\t"
		     "rdmsr\n\t"
		     "shl $32, %%rdx\n\t"
		     "or %%rdx, %%rax\n\t"
		     "mov %%rax, " RUN_FIELD(count_after) "\n\t"
		     : "+D" (run)
		     : RUN_OFFSET(counter_msr), RUN_OFFSET(snippet),
		       RUN_OFFSET(rax), RUN_OFFSET(rcx), RUN_OFFSET(rdx),
		       RUN_OFFSET(rsi), RUN_OFFSET(rdi),
		       RUN_OFFSET(count_before), RUN_OFFSET(count_after)
		     : "rax", "rbx", "rcx", "rdx", "rsi", "r14", "r15",
		       "memory", "cc");
}

static void guest_setup(struct guest_run *run)
{
	if (run->global_ctrl_msr)
		wrmsr(run->global_ctrl_msr, 0);
	wrmsr(run->ctrl_msr, 0);
	wrmsr(run->counter_msr, run->preset);
	if (run->global_clear_msr)
		wrmsr(run->global_clear_msr, run->counter_bit);

	if (run->global_ctrl_msr && !run->enable_globally)
		wrmsr(run->global_ctrl_msr, run->global_ctrl);
	wrmsr(run->ctrl_msr, run->ctrl);
	if (run->global_ctrl_msr && run->enable_globally)
		wrmsr(run->global_ctrl_msr, run->global_ctrl);
}

static u64 guest_nr_nmis;

static void guest_nmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_nmis, guest_nr_nmis + 1);
}

/*
 * Enable the counter for just long enough to count some emulated instructions.
 * The ones that enable and disable the counter may or may not count.
 */
static void guest_overflow(struct guest_run *run)
{
	u64 i, nr_nmis = READ_ONCE(guest_nr_nmis);
	u32 eax, ebx, ecx, edx;

	/* Intel CPUs mask the LVT entry when they deliver the PMI. */
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

	guest_setup(run);
	for (i = 0; i < run->nr_insns; i++)
		__cpuid(0, 0, &eax, &ebx, &ecx, &edx);
	wrmsr(run->ctrl_msr, 0);

	run->value = rdmsr(run->counter_msr);
	if (run->global_status_msr)
		run->status = rdmsr(run->global_status_msr);
	run->nr_pmis = READ_ONCE(guest_nr_nmis) - nr_nmis;
}

static void guest_code(void)
{
	void (*code)(struct guest_run *run);

	x2apic_enable();

	for (;;) {
		GUEST_SYNC(0);

		code = READ_ONCE(guest_run.guest_code);
		code(&guest_run);
	}
}

struct test_case {
	const char *name;
	const u8 *snippet[NR_VENDORS];
	u64 rax, rcx, rdx, rsi, rdi;

	/* Number of instructions and branches that retire. */
	u64 nr_insns, nr_branches;

	/* The CPU may retire the instruction, and does so if KVM doesn't. */
	bool maybe_native;
	bool is_slow;
	bool is_rdpmc;
	bool needs_fep;
	bool is_patched;
};

#define SAME(name)		{ [SVM ... VMX] = snippet_##name }
#define BUFFER			((u64)guest_buffer)

#define CASE(_name, _snippet, _nr_insns, _nr_branches, ...)		\
	{ .name = _name, .snippet = SAME(_snippet),			\
	  .nr_insns = _nr_insns, .nr_branches = _nr_branches, __VA_ARGS__ }

/* A snippet that consists of a single emulated instruction. */
#define INSN(_name, _snippet, ...) \
	CASE(_name, _snippet, 1, 0, __VA_ARGS__)

/* The same for instructions that exit only if emulation is forced. */
#define FEP(_name, _snippet, ...) \
	CASE(_name, _snippet, 1, 0, .needs_fep = true, __VA_ARGS__)

#define FEP_BRANCH(_name, _snippet, ...) \
	CASE(_name, _snippet, 1, 1, .needs_fep = true, __VA_ARGS__)

#define REP(_name, _snippet, _count, ...) \
	INSN("REP " _name " x " #_count, _snippet, .rcx = _count, __VA_ARGS__)

#define PIO(_port)	.rdx = _port, .rsi = BUFFER, .rdi = BUFFER
#define LOAD(_gpa)	.rsi = _gpa, .rdi = BUFFER
#define STORE(_gpa)	.rsi = BUFFER, .rdi = _gpa

static const struct test_case test_cases[] = {
	INSN("CPUID", cpuid),
	CASE("3 CPUIDs", cpuid_x3, 3, 0),
	INSN("RDMSR, kernel", rdmsr, .rcx = MSR_KERNEL),
	INSN("RDMSR, user", rdmsr, .rcx = MSR_USER),
	INSN("WRMSR, kernel", wrmsr, .rcx = MSR_KERNEL, .rax = 1),
	INSN("WRMSR, user", wrmsr, .rcx = MSR_USER),
	INSN("RDPMC", rdpmc, .is_rdpmc = true),
	{
		.name = "hypercall",
		.snippet = { [SVM] = snippet_vmmcall, [VMX] = snippet_vmcall },
		.rax = KVM_HC_VAPIC_POLL_IRQ,
		.nr_insns = 1,
	},
	INSN("hypercall, patched", patched, .rax = KVM_HC_VAPIC_POLL_IRQ, .is_patched = true),
	INSN("WBINVD", wbinvd),
	INSN("INVD", invd),

	INSN("IN, kernel", in, PIO(PIO_KERNEL_PORT)),
	INSN("IN, user", in, PIO(PIO_USER_PORT)),
	INSN("OUT, kernel", out, PIO(PIO_KERNEL_PORT)),
	INSN("OUT, user", out, PIO(PIO_USER_PORT)),
	INSN("INS, kernel", insb, PIO(PIO_KERNEL_PORT)),
	INSN("INS, user", insb, PIO(PIO_USER_PORT)),
	INSN("OUTS, kernel", outsb, PIO(PIO_KERNEL_PORT)),
	INSN("OUTS, user", outsb, PIO(PIO_USER_PORT)),
	REP("INS", rep_insb, 0, PIO(PIO_USER_PORT), .maybe_native = true),
	REP("INS, kernel", rep_insb, 1, PIO(PIO_KERNEL_PORT)),
	REP("INS, kernel", rep_insb, 5, PIO(PIO_KERNEL_PORT)),
	REP("INS, kernel", rep_insb, 5000, PIO(PIO_KERNEL_PORT)),
	REP("INS, user", rep_insb, 1, PIO(PIO_USER_PORT)),
	REP("INS, user", rep_insb, 5, PIO(PIO_USER_PORT)),
	REP("INS, user", rep_insb, 5000, PIO(PIO_USER_PORT)),
	REP("OUTS", rep_outsb, 0, PIO(PIO_USER_PORT), .maybe_native = true),
	REP("OUTS, kernel", rep_outsb, 1, PIO(PIO_KERNEL_PORT)),
	REP("OUTS, kernel", rep_outsb, 5, PIO(PIO_KERNEL_PORT)),
	REP("OUTS, kernel", rep_outsb, 5000, PIO(PIO_KERNEL_PORT)),
	REP("OUTS, user", rep_outsb, 1, PIO(PIO_USER_PORT)),
	REP("OUTS, user", rep_outsb, 5, PIO(PIO_USER_PORT)),
	REP("OUTS, user", rep_outsb, 5000, PIO(PIO_USER_PORT), .is_slow = true),

	INSN("load, kernel", load, LOAD(MMIO_KERNEL_GPA)),
	INSN("load, user", load, LOAD(MMIO_USER_GPA)),
	INSN("store, kernel", store, STORE(MMIO_KERNEL_GPA)),
	INSN("store, user", store, STORE(MMIO_USER_GPA)),
	INSN("split store, user", store, STORE(MMIO_USER_GPA + PAGE_SIZE - 2)),
	INSN("read-modify-write, user", rmw, STORE(MMIO_USER_GPA)),
	INSN("STOS, kernel", stosl, STORE(MMIO_KERNEL_GPA)),
	INSN("STOS, user", stosl, STORE(MMIO_USER_GPA)),
	INSN("MOVS, from user", movsb, LOAD(MMIO_USER_GPA)),
	INSN("MOVS, to user", movsb, STORE(MMIO_USER_GPA)),
	REP("STOS", rep_stosb, 0, STORE(MMIO_USER_GPA), .maybe_native = true),
	REP("STOS, kernel", rep_stosl, 1, STORE(MMIO_KERNEL_GPA)),
	REP("STOS, kernel", rep_stosl, 5, STORE(MMIO_KERNEL_GPA)),
	REP("STOS, user", rep_stosb, 1, STORE(MMIO_USER_GPA)),
	REP("STOS, user", rep_stosb, 5, STORE(MMIO_USER_GPA)),
	REP("STOS, user", rep_stosb, 5000, STORE(MMIO_USER_GPA), .is_slow = true),
	REP("MOVS, from user", rep_movsb, 1, LOAD(MMIO_USER_GPA)),
	REP("MOVS, from user", rep_movsb, 5, LOAD(MMIO_USER_GPA)),
	REP("MOVS, to user", rep_movsb, 1, STORE(MMIO_USER_GPA)),
	REP("MOVS, to user", rep_movsb, 5, STORE(MMIO_USER_GPA)),
	REP("MOVS, to user", rep_movsb, 5000, STORE(MMIO_USER_GPA), .is_slow = true),
	REP("LODS, user", rep_lodsb, 5, LOAD(MMIO_USER_GPA)),
	REP("SCAS, user, equal", rep_scasb, 5, STORE(MMIO_USER_GPA)),
	REP("SCAS, user, unequal", rep_scasb, 5, STORE(MMIO_USER_GPA), .rax = 1),

	FEP("forced ADD", fep_add),
	FEP("forced REP MOVS x 0", fep_rep_movsb, STORE(BUFFER)),
	FEP("forced REP MOVS x 5", fep_rep_movsb, STORE(BUFFER), .rcx = 5),
	FEP_BRANCH("forced JMP", fep_jmp),
	CASE("2 forced JMPs", fep_jmp_x2, 2, 2, .needs_fep = true),
	FEP_BRANCH("forced Jcc, taken", fep_jcc_taken),
	FEP_BRANCH("forced Jcc, not taken", fep_jcc_not_taken),
	FEP_BRANCH("forced LOOP, taken", fep_loop, .rcx = 2),
	FEP_BRANCH("forced LOOP, not taken", fep_loop, .rcx = 1),
	FEP_BRANCH("forced JRCXZ, taken", fep_jrcxz),
	FEP_BRANCH("forced JRCXZ, not taken", fep_jrcxz, .rcx = 1),
};

/* How the counter is set up.  The guest's code runs at CPL 0. */
#define USER			BIT(0)
#define KERNEL			BIT(1)
#define FIXED			BIT(2)
#define DISABLED_LOCALLY	BIT(3)
#define DISABLED_GLOBALLY	BIT(4)
#define ALLOWED			BIT(5)
#define DENIED			BIT(6)
#define WITH_SLOW_CASES		BIT(7)

struct counter_config {
	const char *name;
	enum counted_event event;
	u32 flags;
};

static const struct counter_config configs[] = {
	{ "instructions", INSTRUCTIONS, USER | KERNEL | WITH_SLOW_CASES },
	{ "instructions at CPL 0", INSTRUCTIONS, KERNEL },
	{ "instructions at CPL 3", INSTRUCTIONS, USER },
	{ "instructions, disabled", INSTRUCTIONS, USER | KERNEL | DISABLED_LOCALLY },
	{ "instructions, disabled globally", INSTRUCTIONS, USER | KERNEL | DISABLED_GLOBALLY },
	{ "instructions, allowed by filter", INSTRUCTIONS, USER | KERNEL | ALLOWED },
	{ "instructions, denied by filter", INSTRUCTIONS, USER | KERNEL | DENIED },
	{ "branches", BRANCHES, USER | KERNEL },
	{ "branches at CPL 0", BRANCHES, KERNEL },
	{ "branches at CPL 3", BRANCHES, USER },
	{ "branches, denied by filter", BRANCHES, USER | KERNEL | DENIED },
	{ "fixed counter", INSTRUCTIONS, FIXED | USER | KERNEL },
	{ "fixed counter at CPL 3", INSTRUCTIONS, FIXED | USER },
	{ "fixed counter, allowed by filter", INSTRUCTIONS, FIXED | USER | KERNEL | ALLOWED },
	{ "fixed counter, denied by filter", INSTRUCTIONS, FIXED | USER | KERNEL | DENIED },
};

static bool config_counts(const struct counter_config *config)
{
	return (config->flags & KERNEL) &&
	       !(config->flags & (DISABLED_LOCALLY | DISABLED_GLOBALLY | DENIED));
}

struct counter {
	struct kvm_vm *vm;
	struct kvm_vcpu *vcpu;
	struct guest_run *run;
	const struct counter_config *config;
	bool counts;
	u64 mask;

	/* Results of the empty snippet. */
	u64 count;
	u64 nr_emulated;

	/* Does VMRUN count?  And how many exits aren't between the two reads? */
	bool counts_vmrun;
	u64 nr_exits_outside;
};

/* Are the instructions counted that KVM doesn't emulate?  Set by calibrate(). */
static bool counts_native;

static void run_until_sync(struct counter *c)
{
	struct kvm_run *run = c->vcpu->run;
	struct ucall uc;

	for (;;) {
		vcpu_run(c->vcpu);

		switch (run->exit_reason) {
		case KVM_EXIT_X86_RDMSR:
		case KVM_EXIT_X86_WRMSR:
			TEST_ASSERT_EQ(run->msr.index, MSR_USER);
			run->msr.error = 0;
			continue;
		case KVM_EXIT_MMIO:
			TEST_ASSERT(run->mmio.phys_addr - MMIO_USER_GPA <
				    MMIO_USER_NR_PAGES * PAGE_SIZE,
				    "Unexpected MMIO at GPA 0x%llx", run->mmio.phys_addr);
			memset(run->mmio.data, 0, sizeof(run->mmio.data));
			continue;
		case KVM_EXIT_IO:
			if (run->io.port == PIO_USER_PORT)
				continue;
			break;
		default:
			break;
		}

		switch (get_ucall(c->vcpu, &uc)) {
		case UCALL_SYNC:
			return;
		case UCALL_ABORT:
			REPORT_GUEST_ASSERT(uc);
			break;
		default:
			TEST_FAIL("Unexpected exit reason: %u (%s)", run->exit_reason,
				  exit_reason_str(run->exit_reason));
		}
	}
}

static void run_guest(struct counter *c, void (*guest_code)(struct guest_run *run))
{
	c->run->guest_code = guest_code;
	run_until_sync(c);
}

/*
 * Get the number by which the count may exceed what is expected.  Some Intel
 * CPUs overcount instructions and/or branches on VM-Entry/VM-Exit.  AMD CPUs
 * count VMRUN for the guest, as an instruction and as a branch, which is
 * architectural.
 */
static u64 get_overcount(struct counter *c, u64 nr_exits)
{
	if (!counts_native || !c->counts)
		return 0;

	if (c->config->event == INSTRUCTIONS) {
		if (this_pmu_has_errata(INSTRUCTIONS_RETIRED_OVERCOUNT))
			return -1ull;
	} else if (this_pmu_has_errata(BRANCHES_RETIRED_OVERCOUNT)) {
		return -1ull;
	}

	return c->counts_vmrun ? nr_exits - min(nr_exits, c->nr_exits_outside) : 0;
}

struct result {
	u64 count;
	u64 nr_exits;
	u64 nr_emulated;
};

static void measure(struct counter *c, const u8 *snippet, struct result *res)
{
	res->nr_exits = vcpu_get_stat(c->vcpu, exits);
	res->nr_emulated = vcpu_get_stat(c->vcpu, insn_emulation);

	c->run->snippet = snippet;
	run_guest(c, guest_measure);

	res->nr_exits = vcpu_get_stat(c->vcpu, exits) - res->nr_exits;
	res->nr_emulated = vcpu_get_stat(c->vcpu, insn_emulation) - res->nr_emulated;
	res->count = (c->run->count_after - c->run->count_before) & c->mask;
}

/*
 * Find out how much VMRUN adds to the count, to not let it hide what KVM counts
 * in excess: nothing if the CPU doesn't count it (some emulators), otherwise one
 * per exit between the two reads.  There may be exits for other reasons, too,
 * but not in the same place each time.
 */
static void calibrate_vmrun(struct counter *c)
{
	u64 wanted = c->config->event == INSTRUCTIONS, overcount;
	struct result res;
	int i;

	if (!get_overcount(c, -1ull) || vendor != SVM)
		return;

	c->counts_vmrun = false;
	c->nr_exits_outside = -1ull;
	for (i = 0; i < 3; i++) {
		measure(c, snippet_cpuid, &res);
		overcount = res.count - c->count - wanted;
		TEST_ASSERT(overcount <= res.nr_exits,
			    "%s: wanted %lu events for CPUID, got %lu",
			    c->config->name, wanted, res.count - c->count);

		c->counts_vmrun |= overcount;
		c->nr_exits_outside = min(c->nr_exits_outside, res.nr_exits - overcount);
	}
}

/* Get what there is to subtract from the results of the other snippets. */
static void calibrate(struct counter *c)
{
	u64 emulated = 0, native = 0;
	struct result res;

	/* Let KVM create and schedule a perf event, if it uses perf events. */
	measure(c, snippet_empty, &res);
	measure(c, snippet_empty, &res);

	if (c->counts && c->config->event == INSTRUCTIONS) {
		emulated = NR_EMULATED_INSNS;
		native = NR_NATIVE_INSNS;
	} else if (c->counts) {
		native = NR_NATIVE_BRANCHES;
	}

	if (c->config == &configs[0])
		counts_native = res.count != emulated;
	if (counts_native)
		emulated += native;

	TEST_ASSERT(res.count >= emulated &&
		    res.count - emulated <= get_overcount(c, res.nr_exits),
		    "%s: wanted %lu events for an empty snippet, got %lu",
		    c->config->name, emulated, res.count);

	c->count = emulated;
	c->nr_emulated = res.nr_emulated;

	calibrate_vmrun(c);
}

static bool is_supported(struct counter *c, const struct test_case *t)
{
	return (!t->is_slow || (c->config->flags & WITH_SLOW_CASES)) &&
	       (!t->needs_fep || is_forced_emulation_enabled);
}

static void set_inputs(struct counter *c, const struct test_case *t)
{
	/* VMCALL if it's VMMCALL that the CPU supports, and vice versa. */
	const u8 foreign_hypercall[] = { 0x0f, 0x01, vendor == SVM ? 0xc1 : 0xd9 };

	c->run->rax = t->rax;
	c->run->rcx = t->rcx;
	c->run->rdx = t->rdx;
	c->run->rsi = t->rsi;
	c->run->rdi = t->rdi;
	if (t->is_rdpmc)
		c->run->rcx = (c->config->flags & FIXED) ? INTEL_RDPMC_FIXED : 0;

	if (t->is_patched)
		memcpy(addr_gva2hva(c->vm, (gva_t)snippet_patched), foreign_hypercall,
		       sizeof(foreign_hypercall));
}

static void test_counted(struct counter *c, const struct test_case *t)
{
	u64 wanted = 0, count, slack;
	struct result res;

	/* Not in the first run, which may exit for other reasons, too. */
	if (!t->is_slow) {
		set_inputs(c, t);
		measure(c, t->snippet[vendor], &res);
	}

	set_inputs(c, t);
	measure(c, t->snippet[vendor], &res);
	slack = get_overcount(c, res.nr_exits);

	if (c->counts)
		wanted = c->config->event == INSTRUCTIONS ? t->nr_insns : t->nr_branches;
	if (t->maybe_native && res.nr_emulated == c->nr_emulated && !counts_native)
		wanted = 0;

	count = res.count - c->count;
	TEST_ASSERT(count >= wanted && count - wanted <= slack,
		    "%s, %s: wanted %lu events, got %ld (%s by the CPU)",
		    t->name, c->config->name, wanted, (long)count,
		    counts_native ? "also counted" : "none counted");
}

struct overflow_case {
	const char *name;
	u64 nr_left;
	bool pmi;
	bool enable_globally;
};

static const struct overflow_case overflow_cases[] = {
	{ "-1, no PMI", 1, false, false },
	{ "-1, PMI", 1, true, false },
	{ "-1, no PMI, enabled globally", 1, false, true },
	{ "-1, PMI, enabled globally", 1, true, true },
	{ "-2, no PMI", 2, false, false },
	{ "-2, PMI", 2, true, false },
	{ "-2, PMI, enabled globally", 2, true, true },
	{ "-100, no PMI", 100, false, false },
	{ "-100, PMI", 100, true, false },
};

static void test_overflow(struct counter *c, const struct overflow_case *t)
{
	u64 pmi = (c->config->flags & FIXED) ? FIXED_PMC_CTRL(0, FIXED_PMC_ENABLE_PMI) :
					       ARCH_PERFMON_EVENTSEL_INT;
	u64 wanted_pmis = c->counts && t->pmi;
	u64 wanted_status = c->counts && c->run->global_status_msr ? c->run->counter_bit : 0;
	u64 ctrl = c->run->ctrl, wanted, slack, nr_exits, nr_overflow_exits;
	struct guest_run *run = c->run;

	/* More than needed, as it's up to the CPU when exactly to interrupt. */
	run->nr_insns = t->nr_left + 3;
	run->enable_globally = t->enable_globally;

	/*
	 * Get the number of events.  Nothing overflows, and so the setting for
	 * PMIs doesn't matter, but it must not have an effect on the next run.
	 */
	run->preset = 0;
	run->ctrl = ctrl | (t->pmi ? 0 : pmi);
	nr_exits = vcpu_get_stat(c->vcpu, exits);
	run_guest(c, guest_overflow);
	nr_exits = vcpu_get_stat(c->vcpu, exits) - nr_exits;
	wanted = (run->value - t->nr_left) & c->mask;
	TEST_ASSERT(!run->nr_pmis && !run->status,
		    "no overflow, %s: wanted no PMI and status 0, got %lu and 0x%lx",
		    c->config->name, run->nr_pmis, run->status);

	run->preset = -t->nr_left & c->mask;
	run->ctrl = ctrl | (t->pmi ? pmi : 0);
	nr_overflow_exits = vcpu_get_stat(c->vcpu, exits);
	run_guest(c, guest_overflow);
	nr_overflow_exits = vcpu_get_stat(c->vcpu, exits) - nr_overflow_exits;
	run->ctrl = ctrl;

	TEST_ASSERT(run->nr_pmis == wanted_pmis && run->status == wanted_status,
		    "overflow %s, %s: wanted %lu PMIs and status 0x%lx, got %lu and 0x%lx",
		    t->name, c->config->name, wanted_pmis, wanted_status,
		    run->nr_pmis, run->status);

	/* What the CPU counts includes the PMI's handler. */
	if (wanted_pmis && counts_native)
		return;

	/* One run may have had more exits than the other, in either direction. */
	slack = get_overcount(c, max(nr_exits, nr_overflow_exits));
	TEST_ASSERT(((run->value - wanted) & c->mask) <= slack ||
		    ((wanted - run->value) & c->mask) <= slack,
		    "overflow %s, %s: wanted count 0x%lx, got 0x%lx", t->name,
		    c->config->name, wanted, run->value);
}

static void set_event_filter(struct kvm_vm *vm, const struct counter_config *config)
{
	struct kvm_pmu_event_filter *f;

	f = calloc(1, sizeof(*f) + sizeof(f->events[0]));
	TEST_ASSERT(f, "Failed to allocate memory for the event filter");

	f->action = config->flags & ALLOWED ? KVM_PMU_EVENT_ALLOW : KVM_PMU_EVENT_DENY;
	if (config->flags & FIXED) {
		f->fixed_counter_bitmap = BIT(0);
	} else {
		f->nevents = 1;
		f->events[0] = eventsels[config->event][vendor];
	}

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, f);
	free(f);
}

static bool has_global_ctrl(void)
{
	return vendor == SVM ? kvm_cpu_has(X86_FEATURE_PERFMON_V2) :
			       kvm_cpu_property(X86_PROPERTY_PMU_VERSION) >= 2;
}

static void set_up_msrs(struct counter *c)
{
	const struct counter_config *config = c->config;
	struct guest_run *run = c->run;

	if (vendor == VMX) {
		run->ctrl_msr = MSR_P6_EVNTSEL0;
		run->counter_msr = MSR_IA32_PERFCTR0;
		c->mask = BIT_ULL(kvm_cpu_property(X86_PROPERTY_PMU_GP_COUNTERS_BIT_WIDTH)) - 1;
	} else {
		run->ctrl_msr = MSR_K7_EVNTSEL0;
		run->counter_msr = MSR_K7_PERFCTR0;
		c->mask = BIT_ULL(48) - 1;
	}

	run->counter_bit = BIT_ULL(0);
	run->ctrl = eventsels[config->event][vendor];
	if (config->flags & USER)
		run->ctrl |= ARCH_PERFMON_EVENTSEL_USR;
	if (config->flags & KERNEL)
		run->ctrl |= ARCH_PERFMON_EVENTSEL_OS;
	if (!(config->flags & DISABLED_LOCALLY))
		run->ctrl |= ARCH_PERFMON_EVENTSEL_ENABLE;

	if (config->flags & FIXED) {
		c->mask = BIT_ULL(kvm_cpu_property(X86_PROPERTY_PMU_FIXED_COUNTERS_BIT_WIDTH)) - 1;
		run->ctrl_msr = MSR_CORE_PERF_FIXED_CTR_CTRL;
		run->counter_msr = MSR_CORE_PERF_FIXED_CTR0;
		run->counter_bit = FIXED_PMC_GLOBAL_CTRL_ENABLE(0);
		run->ctrl = FIXED_PMC_CTRL(0, (config->flags & USER ? FIXED_PMC_USER : 0) |
					      (config->flags & KERNEL ? FIXED_PMC_KERNEL : 0));
	}

	if (!has_global_ctrl())
		return;

	run->global_ctrl = (config->flags & DISABLED_GLOBALLY) ? 0 : run->counter_bit;
	if (vendor == VMX) {
		run->global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL;
		run->global_status_msr = MSR_CORE_PERF_GLOBAL_STATUS;
		run->global_clear_msr = MSR_CORE_PERF_GLOBAL_OVF_CTRL;
	} else {
		run->global_ctrl_msr = MSR_AMD64_PERF_CNTR_GLOBAL_CTL;
		run->global_status_msr = MSR_AMD64_PERF_CNTR_GLOBAL_STATUS;
		run->global_clear_msr = MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR;
	}
}

static bool is_config_supported(const struct counter_config *config)
{
	if ((config->flags & (ALLOWED | DENIED)) && !kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER))
		return false;

	if ((config->flags & DISABLED_GLOBALLY) && !has_global_ctrl())
		return false;

	if (vendor == SVM)
		return !(config->flags & FIXED);

	if (config->flags & FIXED)
		return has_global_ctrl() && kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED_FIXED);

	return config->event == INSTRUCTIONS ?
	       kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED) :
	       kvm_pmu_has(X86_PMU_FEATURE_BRANCH_INSNS_RETIRED);
}

static void test_config(const struct counter_config *config)
{
	struct counter c = {
		.config = config,
		.counts = config_counts(config),
		.counts_vmrun = vendor == SVM,
	};
	int i;

	c.vm = vm_create_with_one_vcpu(&c.vcpu, guest_code);
	vm_install_exception_handler(c.vm, NMI_VECTOR, guest_nmi_handler);
	vm_enable_cap(c.vm, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_UNKNOWN);
	virt_map(c.vm, MMIO_USER_GPA, MMIO_USER_GPA, MMIO_USER_NR_PAGES);
	virt_map(c.vm, MMIO_KERNEL_GPA, MMIO_KERNEL_GPA, 1);
	if (config->flags & (ALLOWED | DENIED))
		set_event_filter(c.vm, config);

	c.run = addr_gva2hva(c.vm, (gva_t)&guest_run);
	set_up_msrs(&c);

	/* Let the guest get to its first GUEST_SYNC(). */
	run_until_sync(&c);

	run_guest(&c, guest_setup);
	calibrate(&c);

	for (i = 0; i < ARRAY_SIZE(test_cases); i++) {
		if (is_supported(&c, &test_cases[i]))
			test_counted(&c, &test_cases[i]);
	}

	if (config->event == INSTRUCTIONS) {
		for (i = 0; i < ARRAY_SIZE(overflow_cases); i++)
			test_overflow(&c, &overflow_cases[i]);
	}

	kvm_vm_free(c.vm);
}

int main(int argc, char *argv[])
{
	int i;

	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(host_cpu_is_intel || host_cpu_is_amd_compatible);
	TEST_REQUIRE(kvm_has_cap(KVM_CAP_X86_USER_SPACE_MSR));

	vendor = host_cpu_is_amd_compatible ? SVM : VMX;
	TEST_REQUIRE(is_config_supported(&configs[0]));

	for (i = 0; i < ARRAY_SIZE(configs); i++) {
		if (is_config_supported(&configs[i]))
			test_config(&configs[i]);
	}

	return 0;
}
