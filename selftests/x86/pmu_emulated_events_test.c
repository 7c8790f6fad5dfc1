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
 *
 * What isn't obvious, and how this test treats it:
 *
 *  - WRMSR that enables or disables the counter.  KVM counts the former, and not
 *    the latter, as the instruction retires after the write took effect.  Only
 *    the sum is known to be the same as on CPUs, which is what tests that count
 *    natively rely on, e.g. pmu_counters_test: one of the two WRMSRs counts.
 *    Which one isn't architectural, and can't be told from a count, so the test
 *    compares runs that include both.
 *  - A period of one.  perf programs x86 counters for at least two events, as
 *    some CPUs can't handle one, i.e. an event that is counted by the CPU and
 *    wraps a counter which was preset to -1 is noticed one event late.  KVM
 *    can't improve on that, but isn't subject to it when an emulated event
 *    wraps the counter.  The latter has to be exact; when the CPU counts, too,
 *    guests run a few more events than needed before they look.
 *  - VMRUN.  SVM CPUs count a successful VMRUN as an instruction and a branch
 *    of the guest.  KVM retires the instruction for the sake of L1, but no
 *    branch, neither in L1, where there is none, nor in L2, where it would get
 *    in the way of exact counts.
 *  - VMLAUNCH and VMRESUME are instructions and branches of L1, unless they
 *    VMFail, in which case the next instruction is executed as usual.
 *  - An instruction which is intercepted by L1 doesn't retire.
 *  - ICEBP and other events.  The delivery of an exception isn't a branch as far
 *    as KVM is concerned.
 */
#include <pthread.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "svm_util.h"
#include "vmx.h"
#include "apic.h"
#include "pmu.h"

/* A port and a page that don't belong to any memslot or in-kernel device. */
#define PIO_USER_PORT		0xe000
#define MMIO_USER_GPA		0xd0000000ul
#define MMIO_USER_NR_PAGES	2

/* A page of RAM, like the above pages followed by one that isn't mapped. */
#define LAST_RAM_GVA		0xd1000000ul
#define UNMAPPED_GVA		0xd2000000ul

/* Edge/level control register of the PIC, and the I/O APIC's index register. */
#define PIO_KERNEL_PORT		0x4d0
#define MMIO_KERNEL_GPA		0xfec00000ul

/* An MSR that KVM doesn't know, and one that exists only in software. */
#define MSR_USER		0x4b564d00
#define MSR_KERNEL		MSR_KVM_POLL_CONTROL

#define APIC_LVTPC		0x340
#define PMI_VECTOR		0x60

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
static struct svm_test_data *svm;
static struct vmx_pages *vmx;

/* Where string instructions find and leave their data. */
static u8 guest_buffer[2 * PAGE_SIZE] __aligned(PAGE_SIZE);

/* What the guest shall do next, and what came out of it. */
struct guest_run {
	void (*guest_code)(struct guest_run *run);

	/* How to set up and enable the counter. */
	u32 ctrl_msr, counter_msr;
	u32 global_ctrl_msr, global_status_msr, global_clear_msr;
	u64 ctrl, global_ctrl, counter_bit;

	/* The same for a second counter, if ctrl2 isn't zero. */
	u32 ctrl2_msr, counter2_msr;
	u64 ctrl2;

	/* Inputs and outputs of guest_measure(). */
	const void *snippet;
	u32 rdpmc_index;
	u64 rax, rcx, rdx, rsi, rdi;
	u64 count_before, count_after;

	/* Inputs of guest_measure_l2(). */
	const void *l2_snippet;
	bool relaunch, bad_entry;

	/* Inputs of guest_overflow() and guest_count(). */
	u64 preset, nr_insns, nr_rounds;
	u32 lvtpc;
	bool enable_globally, unmask;

	/* Output of guest_probe_icebp(). */
	bool has_icebp;

	/* Outputs of guest_overflow(). */
	u64 value, status, nr_pmis;
};

static struct guest_run guest_run;

/*
 * Define a snippet.  It may clobber RAX, RBX, RCX, RDX, RSI, RDI, and R8 to R11.
 * If it uses the stack, it has to skip what the compiler may keep below RSP.
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

#define SKIP_RED_ZONE	"lea -256(%rsp), %rsp; "
#define UNDO_SKIP	"lea 256(%rsp), %rsp"

/* CALL and RET are emulated, JMP and both uses of LEA aren't. */
SNIPPET(fep_call_ret, SKIP_RED_ZONE KVM_FEP "call 1f; jmp 2f; 1:" KVM_FEP "ret; 2:" UNDO_SKIP);

/* The hypercall makes the vCPU's next HLT a mere NOP. */
SNIPPET(hlt_svm, "vmmcall; hlt");
SNIPPET(hlt_vmx, "vmcall; hlt");

SNIPPET(xsetbv, "xsetbv");
SNIPPET(mov_cr0, "mov %rax, %cr0; mov %rdx, %cr0");
SNIPPET(mov_cr3, "mov %cr3, %rax; mov %rax, %cr3");
SNIPPET(mov_cr4, "mov %rax, %cr4; mov %rdx, %cr4");
SNIPPET(mov_cr8, "mov %rax, %cr8");
SNIPPET(mov_dr, "mov %rax, %dr0");
SNIPPET(monitor, "monitor");
SNIPPET(mwait, "mwait");

/* Instructions that end in an exception, and what the CPU does instead. */
SNIPPET(icebp, ".byte 0xf1");
SNIPPET(int_db, "int $1");

#define SINGLE_STEP_INSN(insn)						\
	SKIP_RED_ZONE "pushfq; orq $0x100, (%rsp); popfq;" insn "; " UNDO_SKIP

SNIPPET(tf_cpuid, SINGLE_STEP_INSN("cpuid"));
SNIPPET(tf_in, SINGLE_STEP_INSN("in %dx, %al"));
SNIPPET(tf_load, SINGLE_STEP_INSN("mov (%rsi), %eax"));
SNIPPET(tf_native, SINGLE_STEP_INSN("nop"));

/* The handler resumes at R11, or makes the access succeed if R11 is zero. */
SNIPPET(fep_load_fault, "lea 1f(%rip), %r11;" KVM_FEP "mov (%rsi), %rax; 1:");
SNIPPET(load_fault, "lea 1f(%rip), %r11; mov (%rsi), %rax; 1:");
SNIPPET(outsb_fault, "xor %r11d, %r11d; rep outsb");
SNIPPET(movsb_fault, "xor %r11d, %r11d; rep movsb");
SNIPPET(stosb_fault, "xor %r11d, %r11d; rep stosb");
SNIPPET(load_resumed, "xor %r11d, %r11d; mov (%rsi), %al");

/* Enter L2, which executes another snippet, and exit from it. */
SNIPPET(l2_exit_svm, "vmmcall");
SNIPPET(l2_exit_vmx, "vmcall");
SNIPPET(vmrun, "mov %r14, %r13; lea snippet_l2_exit_svm(%rip), %r14;"
	       "vmrun %rax; mov %r13, %r14");
SNIPPET(vmlaunch, "mov %r14, %r13; lea snippet_l2_exit_vmx(%rip), %r14;"
		  "mov %rsp, %r12; vmlaunch; ud2");
SNIPPET(vmresume, "mov %r14, %r13; lea snippet_l2_exit_vmx(%rip), %r14;"
		  "mov %rsp, %r12; vmresume; ud2");
SNIPPET(vmexit, "mov %r12, %rsp; mov %r13, %r14");
SNIPPET(vmlaunch_vmfail, "vmlaunch");

/* What isn't emulated in the above, plus L2's JMP to where it exits. */
#define NR_NATIVE_VMRUN_INSNS		(2 + 1 + 1)
#define NR_NATIVE_VMRESUME_INSNS	(3 + 1 + 2)
#define NR_NATIVE_L2_BRANCHES		1

#define RUN_OFFSET(field) \
	[off_##field] "i" (offsetof(struct guest_run, field))

#define RUN_FIELD(field)	"%c[off_" #field "](%%r15)"

/*
 * Instructions and branches between the two reads of the counter if the snippet
 * is empty.  Besides the first RDPMC, which retires after it has read the
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
		     "mov " RUN_FIELD(rdpmc_index) ", %%ecx\n\t"
		     "lfence\n\t"
		     "rdpmc\n\t"
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
		     "mov " RUN_FIELD(rdpmc_index) ", %%ecx\n\t"
		     "lfence\n\t"
		     "rdpmc\n\t"
		     "shl $32, %%rdx\n\t"
		     "or %%rdx, %%rax\n\t"
		     "mov %%rax, " RUN_FIELD(count_after) "\n\t"
		     : "+D" (run)
		     : RUN_OFFSET(rdpmc_index), RUN_OFFSET(snippet),
		       RUN_OFFSET(rax), RUN_OFFSET(rcx), RUN_OFFSET(rdx),
		       RUN_OFFSET(rsi), RUN_OFFSET(rdi),
		       RUN_OFFSET(count_before), RUN_OFFSET(count_after)
		     : "rax", "rbx", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11",
		       "r12", "r13", "r14", "r15", "memory", "cc");
}

static void guest_init_l2(struct guest_run *run)
{
	if (vendor == SVM) {
		generic_svm_setup(svm, NULL);
		return;
	}

	GUEST_ASSERT(prepare_for_vmx_operation(vmx));
	GUEST_ASSERT(load_vmcs(vmx));
	prepare_vmcs(vmx, NULL);

	/* The code at HOST_RIP gets the actual RSP from a register. */
	GUEST_ASSERT(!vmwrite(HOST_RIP, (u64)snippet_vmexit));
	GUEST_ASSERT(!vmwrite(HOST_RSP, (u64)vmx->stack));
}

static void guest_measure_l2(struct guest_run *run)
{
	static bool launched;

	if (vendor == SVM) {
		struct vmcb *vmcb = svm->vmcb;

		vmcb->save.rip = (u64)run->l2_snippet;
		vmcb->save.rsp = (u64)svm->stack;
		vmcb->save.rax = run->rax;
		vmcb->save.rflags = X86_EFLAGS_FIXED;
		vmcb->control.asid = !run->bad_entry;
		run->rax = svm->vmcb_gpa;
		run->snippet = snippet_vmrun;

		guest_measure(run);
		stgi();
		GUEST_ASSERT_EQ(vmcb->control.exit_code,
				run->bad_entry ? SVM_EXIT_ERR : SVM_EXIT_VMMCALL);
		return;
	}

	if (run->relaunch) {
		GUEST_ASSERT(!vmclear(vmx->vmcs_gpa));
		GUEST_ASSERT(!vmptrld(vmx->vmcs_gpa));
		launched = false;
	}

	GUEST_ASSERT(!vmwrite(GUEST_RIP, (u64)run->l2_snippet));
	GUEST_ASSERT(!vmwrite(GUEST_RSP, (u64)vmx->stack));
	GUEST_ASSERT(!vmwrite(GUEST_RFLAGS, X86_EFLAGS_FIXED));
	GUEST_ASSERT(!vmwrite(VMCS_LINK_POINTER, run->bad_entry ? 1 : -1ull));
	run->snippet = launched ? snippet_vmresume : snippet_vmlaunch;
	launched = true;

	guest_measure(run);
	GUEST_ASSERT_EQ(vmreadz(VM_EXIT_REASON) & ~EXIT_REASON_FAILED_VMENTRY,
			run->bad_entry ? EXIT_REASON_INVALID_STATE : EXIT_REASON_VMCALL);
}

static void guest_setup(struct guest_run *run)
{
	if (run->global_ctrl_msr)
		wrmsr(run->global_ctrl_msr, 0);
	wrmsr(run->ctrl_msr, 0);
	wrmsr(run->counter_msr, run->preset);
	if (run->global_clear_msr)
		wrmsr(run->global_clear_msr, run->counter_bit);
	if (run->ctrl2) {
		wrmsr(run->counter2_msr, 0);
		wrmsr(run->ctrl2_msr, run->ctrl2);
	}

	if (run->global_ctrl_msr && !run->enable_globally)
		wrmsr(run->global_ctrl_msr, run->global_ctrl);
	wrmsr(run->ctrl_msr, run->ctrl);
	if (run->global_ctrl_msr && run->enable_globally)
		wrmsr(run->global_ctrl_msr, run->global_ctrl);
}

/* Where the CPU finds a stack if there's an exception at CPL 3. */
static u8 guest_stack[PAGE_SIZE] __aligned(16);

static u64 guest_nr_pmis;

static void guest_nmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_pmis, guest_nr_pmis + 1);
}

static void guest_pmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_pmis, guest_nr_pmis + 1);

	/* EOI is an emulated instruction, and not to be counted. */
}

static void guest_db_handler(struct ex_regs *regs)
{
	regs->rflags &= ~X86_EFLAGS_TF;
}

static void guest_pf_handler(struct ex_regs *regs)
{
	if (regs->r11) {
		regs->rip = regs->r11;
		return;
	}

	/* Let KVM emulate the rest as well. */
	regs->rsi = MMIO_USER_GPA;
	regs->rdi = MMIO_USER_GPA;
}

/*
 * Enable the counter for just long enough to count some emulated instructions.
 * The ones that enable and disable the counter may or may not count.
 */
static void guest_overflow(struct guest_run *run)
{
	u64 i, round, nr_pmis = READ_ONCE(guest_nr_pmis);
	u32 eax, ebx, ecx, edx;

	/* Fixed interrupts must not hit anything but this. */
	asm volatile("sti");

	for (round = 0; round < run->nr_rounds; round++) {
		/* Intel CPUs mask the LVT entry when they deliver the PMI. */
		if (!round || run->unmask)
			x2apic_write_reg(APIC_LVTPC, run->lvtpc);

		guest_setup(run);
		for (i = 0; i < run->nr_insns; i++)
			__cpuid(0, 0, &eax, &ebx, &ecx, &edx);
		wrmsr(run->ctrl_msr, 0);

		if ((run->lvtpc & APIC_DM_FIXED_MASK) == APIC_DM_FIXED)
			x2apic_write_reg(APIC_EOI, 0);
	}

	asm volatile("cli");

	run->value = rdmsr(run->counter_msr);
	if (run->global_status_msr)
		run->status = rdmsr(run->global_status_msr);
	run->nr_pmis = READ_ONCE(guest_nr_pmis) - nr_pmis;
}

/* Not all emulators of CPUs know ICEBP. */
static void guest_probe_icebp(struct guest_run *run)
{
	run->has_icebp = kvm_asm_safe(".byte 0xf1") != UD_VECTOR;
}

/* Let the counter run. */
static void guest_count(struct guest_run *run)
{
	u32 eax, ebx, ecx, edx;
	u64 i;

	GUEST_ASSERT(!rdpmc_safe(run->rdpmc_index, &run->count_before));
	for (i = 0; i < run->nr_insns; i++)
		__cpuid(0, 0, &eax, &ebx, &ecx, &edx);
	GUEST_ASSERT(!rdpmc_safe(run->rdpmc_index, &run->count_after));
}

static void guest_code(void)
{
	void (*code)(struct guest_run *run);

	x2apic_enable();
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

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

	/* How many of them, in addition, the CPU retires in any case. */
	u64 nr_native_insns, nr_native_branches;

	/*
	 * If exceptions are involved, a snippet with as many instructions, none
	 * of them emulated, i.e. one that counts as much if the CPU counts.
	 */
	const u8 *native_snippet;

	/* Debug features of KVM to be used. */
	u32 guest_debug;

	/* The CPU may retire the instruction, and does so if KVM doesn't. */
	bool maybe_native;
	bool is_slow;
	bool is_rdpmc;
	bool needs_fep;
	bool needs_icebp;
	bool needs_mwait;
	bool needs_xsave;
	bool is_patched;

	/* Toggle a bit of a control register. */
	u64 cr0_bit, cr4_bit;

	/* The instructions aren't for CPL 3. */
	bool kernel_only;

	/* The instructions affect, or are affected by, single-stepping. */
	bool is_debug;

	/* The instructions can be executed by L2 without an exit to L1. */
	bool in_l2[NR_VENDORS];

	/* Executed by L1 to enter, or to try to enter, L2. */
	bool is_entry;
	bool relaunch, bad_entry;
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

/* Instructions for CPL 0. */
#define PRIV(_name, _snippet, ...) \
	INSN(_name, _snippet, .kernel_only = true, __VA_ARGS__)

#define L2_ANY		.in_l2 = { [SVM ... VMX] = true }
#define L2_SVM		.in_l2 = { [SVM] = true }

#define PIO(_port)	L2_ANY, .rdx = _port, .rsi = BUFFER, .rdi = BUFFER
#define LOAD(_gpa)	L2_ANY, .rsi = _gpa, .rdi = BUFFER
#define STORE(_gpa)	L2_ANY, .rsi = BUFFER, .rdi = _gpa

static const struct test_case test_cases[] = {
	INSN("CPUID", cpuid, L2_SVM),
	CASE("3 CPUIDs", cpuid_x3, 3, 0, L2_SVM),
	PRIV("RDMSR, kernel", rdmsr, .rcx = MSR_KERNEL, L2_SVM),
	PRIV("RDMSR, user", rdmsr, .rcx = MSR_USER, L2_SVM),
	PRIV("WRMSR, kernel", wrmsr, .rcx = MSR_KERNEL, .rax = 1, L2_SVM),
	PRIV("WRMSR, user", wrmsr, .rcx = MSR_USER, L2_SVM),
	INSN("RDPMC", rdpmc, .is_rdpmc = true, L2_ANY),
	{
		.name = "hypercall",
		.snippet = { [SVM] = snippet_vmmcall, [VMX] = snippet_vmcall },
		.rax = KVM_HC_VAPIC_POLL_IRQ,
		.nr_insns = 1,
	},
	PRIV("hypercall, patched", patched, .rax = KVM_HC_VAPIC_POLL_IRQ, .is_patched = true),
	PRIV("WBINVD", wbinvd, L2_ANY),
	PRIV("INVD", invd, L2_SVM),
	{
		.name = "hypercall and HLT",
		.snippet = { [SVM] = snippet_hlt_svm, [VMX] = snippet_hlt_vmx },
		.rax = KVM_HC_KICK_CPU,
		.nr_insns = 2,
		.kernel_only = true,
	},
	PRIV("XSETBV", xsetbv, .needs_xsave = true, .maybe_native = true),
	CASE("MOV to CR0", mov_cr0, 2, 0, .cr0_bit = X86_CR0_AM,
	     .kernel_only = true, .maybe_native = true),
	CASE("MOV from and to CR3", mov_cr3, 2, 0, .kernel_only = true, .maybe_native = true),
	CASE("MOV to CR4", mov_cr4, 2, 0, .cr4_bit = X86_CR4_MCE,
	     .kernel_only = true, .maybe_native = true),
	PRIV("MOV to CR8", mov_cr8, .maybe_native = true),
	/* KVM gives the guest the debug registers, and lets it try again. */
	CASE("MOV to DR", mov_dr, 0, 0, .nr_native_insns = 1, .kernel_only = true,
	     .is_debug = true),
	PRIV("MOV to DR, debugged", mov_dr, .is_debug = true,
	     .guest_debug = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP),
	PRIV("MONITOR", monitor, .rax = BUFFER, .needs_mwait = true),
	PRIV("MWAIT", mwait, .needs_mwait = true),
	PRIV("ICEBP", icebp, .native_snippet = snippet_int_db, .is_debug = true,
	     .needs_icebp = true),
	PRIV("CPUID, TF", tf_cpuid, .native_snippet = snippet_tf_native, .is_debug = true),
	PRIV("IN, user, TF", tf_in, .native_snippet = snippet_tf_native, .is_debug = true,
	     .rdx = PIO_USER_PORT),
	PRIV("load, user, TF", tf_load, .native_snippet = snippet_tf_native, .is_debug = true,
	     .rsi = MMIO_USER_GPA),

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

	PRIV("REP OUTS x 5, page fault", outsb_fault, .rcx = 5, .rdx = PIO_USER_PORT,
	     .native_snippet = snippet_load_resumed, .rsi = LAST_RAM_GVA + PAGE_SIZE - 2),
	PRIV("REP MOVS x 5, from user, page fault", movsb_fault, .rcx = 5, .rdi = BUFFER,
	     .native_snippet = snippet_load_resumed,
	     .rsi = MMIO_USER_GPA + MMIO_USER_NR_PAGES * PAGE_SIZE - 2),
	PRIV("REP STOS x 5, to user, page fault", stosb_fault, .rcx = 5, .rsi = UNMAPPED_GVA,
	     .native_snippet = snippet_load_resumed,
	     .rdi = MMIO_USER_GPA + MMIO_USER_NR_PAGES * PAGE_SIZE - 2),

	CASE("forced load, page fault", fep_load_fault, 0, 0, .rsi = UNMAPPED_GVA,
	     .native_snippet = snippet_load_fault, .kernel_only = true, .needs_fep = true),
	CASE("forced CALL and RET", fep_call_ret, 2, 2, .nr_native_insns = 3,
	     .nr_native_branches = 1, .needs_fep = true, L2_ANY),
	FEP("forced ADD", fep_add, L2_ANY),
	FEP("forced REP MOVS x 0", fep_rep_movsb, STORE(BUFFER)),
	FEP("forced REP MOVS x 5", fep_rep_movsb, STORE(BUFFER), .rcx = 5),
	FEP_BRANCH("forced JMP", fep_jmp, L2_ANY),
	CASE("2 forced JMPs", fep_jmp_x2, 2, 2, .needs_fep = true, L2_ANY),
	FEP_BRANCH("forced Jcc, taken", fep_jcc_taken, L2_ANY),
	FEP_BRANCH("forced Jcc, not taken", fep_jcc_not_taken, L2_ANY),
	FEP_BRANCH("forced LOOP, taken", fep_loop, .rcx = 2),
	FEP_BRANCH("forced LOOP, not taken", fep_loop, .rcx = 1),
	FEP_BRANCH("forced JRCXZ, taken", fep_jrcxz),
	FEP_BRANCH("forced JRCXZ, not taken", fep_jrcxz, .rcx = 1),

	{
		.name = "VMLAUNCH",
		.snippet = { [VMX] = snippet_empty },
		.nr_insns = 1,
		.nr_branches = 1,
		.nr_native_insns = NR_NATIVE_VMRESUME_INSNS,
		.nr_native_branches = NR_NATIVE_L2_BRANCHES,
		.is_entry = true,
		.relaunch = true,
	},
	{
		.name = "VMLAUNCH, VMFail",
		.snippet = { [VMX] = snippet_vmlaunch_vmfail },
		.nr_insns = 1,
		.is_entry = true,
	},
	{
		/* L2 doesn't execute its JMP. */
		.name = "VMRESUME, bad guest state",
		.snippet = { [VMX] = snippet_empty },
		.nr_insns = 1,
		.nr_branches = 1,
		.nr_native_insns = NR_NATIVE_VMRESUME_INSNS - 1,
		.is_entry = true,
		.bad_entry = true,
	},
	{
		.name = "VMRUN, bad guest state",
		.snippet = { [SVM] = snippet_empty },
		.nr_insns = 1,
		.nr_native_insns = NR_NATIVE_VMRUN_INSNS - 1,
		.is_entry = true,
		.bad_entry = true,
	},
};

/* How the counter is set up, and how the guest's code is run. */
#define USER			BIT(0)
#define KERNEL			BIT(1)
#define FIXED			BIT(2)
#define DISABLED_LOCALLY	BIT(3)
#define DISABLED_GLOBALLY	BIT(4)
#define ALLOWED			BIT(5)
#define DENIED			BIT(6)
#define WITH_SLOW_CASES		BIT(7)
#define CPL3			BIT(8)
#define TWO_COUNTERS		BIT(9)
#define NESTED			BIT(10)
#define SINGLE_STEP		BIT(11)
#define VERSION_1		BIT(12)

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
	{ "instructions and branches", INSTRUCTIONS, USER | KERNEL | TWO_COUNTERS },
	{ "branches and instructions", BRANCHES, USER | KERNEL | TWO_COUNTERS },
	{ "instructions, PMU version 1", INSTRUCTIONS, USER | KERNEL | VERSION_1 },
	{ "instructions, single-stepped", INSTRUCTIONS, USER | KERNEL | SINGLE_STEP },
	{ "branches, single-stepped", BRANCHES, USER | KERNEL | SINGLE_STEP },
	{ "user instructions", INSTRUCTIONS, USER | KERNEL | CPL3 },
	{ "user instructions at CPL 0", INSTRUCTIONS, KERNEL | CPL3 },
	{ "user instructions at CPL 3", INSTRUCTIONS, USER | CPL3 },
	{ "user branches at CPL 3", BRANCHES, USER | CPL3 },
	{ "instructions of L2", INSTRUCTIONS, USER | KERNEL | NESTED },
	{ "branches of L2", BRANCHES, USER | KERNEL | NESTED },
	{ "fixed counter", INSTRUCTIONS, FIXED | USER | KERNEL },
	{ "fixed counter, user, at CPL 3", INSTRUCTIONS, FIXED | USER | CPL3 },
	{ "fixed counter at CPL 3", INSTRUCTIONS, FIXED | USER },
	{ "fixed counter, allowed by filter", INSTRUCTIONS, FIXED | USER | KERNEL | ALLOWED },
	{ "fixed counter, denied by filter", INSTRUCTIONS, FIXED | USER | KERNEL | DENIED },
};

static bool config_counts(const struct counter_config *config)
{
	return (config->flags & (config->flags & CPL3 ? USER : KERNEL)) &&
	       !(config->flags & (DISABLED_LOCALLY | DISABLED_GLOBALLY | DENIED));
}

struct counter {
	struct kvm_vm *vm;
	struct kvm_vcpu *vcpu;
	struct guest_run *run;
	const struct counter_config *config;
	bool counts;
	u64 mask;

	/* Results of the empty snippet, and what it is for L1. */
	u64 count, count2, l1_count;
	u64 nr_emulated, nr_exits;

	/* Does VMRUN count?  And how many exits aren't between the two reads? */
	bool counts_vmrun;
	u64 nr_exits_outside;
};

/* Report everything that is wrong before failing. */
static int nr_failures;

#define EXPECT(cond, fmt, ...)						\
do {									\
	if (!(cond)) {							\
		pr_info("FAIL " fmt "\n", ##__VA_ARGS__);			\
		nr_failures++;						\
	}								\
} while (0)

/* Are the instructions counted that KVM doesn't emulate?  Set by calibrate(). */
static bool counts_native;

static void set_single_step(struct counter *c, bool enable)
{
	struct kvm_guest_debug debug = {
		.control = enable ? KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP : 0,
	};

	if (c->config->flags & SINGLE_STEP)
		vcpu_guest_debug_set(c->vcpu, &debug);
}

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
		case KVM_EXIT_DEBUG:
			if (!(c->config->flags & SINGLE_STEP))
				break;

			/* GUEST_SYNC() is no business of the debugger. */
			if (c->run->count_after != -1ull)
				set_single_step(c, false);
			continue;
		default:
			break;
		}

		/* get_ucall() completes the instruction, which would be a step. */
		set_single_step(c, false);

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

static void run_in_guest(struct counter *c, void (*guest_code)(struct guest_run *run))
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
	u64 count, count2;
	u64 nr_exits;
	u64 nr_emulated;
};

static void measure(struct counter *c, const u8 *snippet, bool in_l2, struct result *res)
{
	res->nr_exits = vcpu_get_stat(c->vcpu, exits);
	res->nr_emulated = vcpu_get_stat(c->vcpu, insn_emulation);
	if (c->run->ctrl2)
		res->count2 = vcpu_get_msr(c->vcpu, c->run->counter2_msr);

	c->run->snippet = snippet;
	c->run->l2_snippet = snippet;
	c->run->count_after = -1ull;
	set_single_step(c, true);
	run_in_guest(c, in_l2 ? guest_measure_l2 : guest_measure);

	if (c->run->ctrl2)
		res->count2 = vcpu_get_msr(c->vcpu, c->run->counter2_msr) - res->count2;

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
		measure(c, snippet_cpuid, c->config->flags & NESTED, &res);
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
	u64 emulated = 0, native = 0, l2_emulated = 0, l2_native = 0;
	bool in_l2 = c->config->flags & NESTED;
	struct result res;
	int i;

	/* Let KVM create and schedule a perf event, if it uses perf events. */
	measure(c, snippet_empty, in_l2, &res);

	/* Interrupts of the host exit, too, and are none of the guest's. */
	c->nr_exits = -1ull;
	for (i = 0; i < 3; i++) {
		measure(c, snippet_empty, in_l2, &res);
		c->nr_exits = min(c->nr_exits, res.nr_exits);
	}

	if (c->counts && c->config->event == INSTRUCTIONS) {
		emulated = NR_EMULATED_INSNS;
		native = NR_NATIVE_INSNS;
		l2_emulated = 1;
		l2_native = vendor == SVM ? NR_NATIVE_VMRUN_INSNS : NR_NATIVE_VMRESUME_INSNS;
	} else if (c->counts) {
		native = NR_NATIVE_BRANCHES;
		l2_emulated = vendor == VMX;
		l2_native = NR_NATIVE_L2_BRANCHES;
	}

	if (c->config == &configs[0])
		counts_native = res.count != emulated;
	if (counts_native) {
		emulated += native;
		l2_emulated += l2_native;
	}
	c->l1_count = emulated;
	if (in_l2)
		emulated += l2_emulated;

	TEST_ASSERT(res.count >= emulated &&
		    res.count - emulated <= get_overcount(c, res.nr_exits),
		    "%s: wanted %lu events for an empty snippet, got %lu",
		    c->config->name, emulated, res.count);

	c->count = emulated;
	c->count2 = res.count2;
	c->nr_emulated = res.nr_emulated;

	calibrate_vmrun(c);
}

/*
 * What stands in for ICEBP to find out what the CPU counts is INT n, which the CPU
 * may count as a branch, unlike ICEBP.
 */
static bool has_exact_icebp(struct counter *c)
{
	if (counts_native && (c->config->event == BRANCHES || c->run->ctrl2))
		return false;

	return c->run->has_icebp;
}

static bool is_supported(struct counter *c, const struct test_case *t)
{
	u32 flags = c->config->flags;

	return t->snippet[vendor] &&
	       (!t->is_slow || (flags & WITH_SLOW_CASES)) &&
	       (!t->needs_fep || is_forced_emulation_enabled) &&
	       (!t->needs_icebp || has_exact_icebp(c)) &&
	       (!t->needs_mwait || this_cpu_has(X86_FEATURE_MWAIT)) &&
	       (!t->needs_xsave || kvm_cpu_has(X86_FEATURE_XSAVE)) &&
	       (!t->kernel_only || !(flags & CPL3)) &&
	       (!(t->is_debug || t->maybe_native) || !(flags & SINGLE_STEP)) &&
	       (flags & NESTED ? t->is_entry || t->in_l2[vendor] : !t->is_entry);
}

static void set_inputs(struct counter *c, const struct test_case *t)
{
	/* VMCALL if it's VMMCALL that the CPU supports, and vice versa. */
	const u8 foreign_hypercall[] = { 0x0f, 0x01, vendor == SVM ? 0xc1 : 0xd9 };
	struct kvm_sregs sregs;

	c->run->rax = t->rax;
	c->run->rcx = t->rcx;
	c->run->rdx = t->rdx;
	c->run->rsi = t->rsi;
	c->run->rdi = t->rdi;
	c->run->relaunch = t->relaunch;
	c->run->bad_entry = t->bad_entry;
	if (t->is_rdpmc)
		c->run->rcx = c->run->rdpmc_index;
	if (t->needs_xsave)
		c->run->rax = kvm_cpu_supported_xcr0();

	if (t->cr0_bit || t->cr4_bit) {
		vcpu_sregs_get(c->vcpu, &sregs);
		c->run->rdx = t->cr0_bit ? sregs.cr0 : sregs.cr4;
		c->run->rax = c->run->rdx ^ (t->cr0_bit | t->cr4_bit);
	}

	if (t->is_patched)
		memcpy(addr_gva2hva(c->vm, (gva_t)snippet_patched), foreign_hypercall,
		       sizeof(foreign_hypercall));
}

static u64 get_wanted(const struct test_case *t, enum counted_event event)
{
	if (event == INSTRUCTIONS)
		return t->nr_insns + (counts_native ? t->nr_native_insns : 0);

	return t->nr_branches + (counts_native ? t->nr_native_branches : 0);
}

static void test_counted(struct counter *c, const struct test_case *t)
{
	struct kvm_guest_debug debug = { .control = t->guest_debug };
	bool in_l2 = (c->config->flags & NESTED) && t->snippet[vendor] != snippet_vmlaunch_vmfail;
	u64 wanted = 0, wanted2 = 0, base = t->is_entry ? c->l1_count : c->count;
	u64 count, slack, nr_exits = -1ull;
	int i, nr_runs = t->is_slow ? 1 : t->maybe_native ? 4 : 2;
	struct result native = {}, res;

	if (t->native_snippet) {
		set_inputs(c, t);
		c->run->rsi = UNMAPPED_GVA;
		measure(c, t->native_snippet, in_l2, &native);
	}

	if (t->guest_debug)
		vcpu_guest_debug_set(c->vcpu, &debug);

	/* Check the last run, as the first one may exit for other reasons, too. */
	for (i = 0; i < nr_runs; i++) {
		set_inputs(c, t);
		measure(c, t->snippet[vendor], in_l2, &res);
		nr_exits = min(nr_exits, res.nr_exits);
	}
	slack = get_overcount(c, res.nr_exits);

	if (t->guest_debug) {
		debug.control = 0;
		vcpu_guest_debug_set(c->vcpu, &debug);
	}

	if (c->counts) {
		wanted = get_wanted(t, c->config->event);
		wanted2 = get_wanted(t, !c->config->event);
	}

	/* What the handlers of exceptions execute is known only to the CPU. */
	if (counts_native && t->native_snippet) {
		wanted = native.count - base;
		wanted2 = native.count2 - c->count2;
		if (!t->nr_insns && !c->counts)
			wanted = 0;
	}

	if (t->maybe_native && !counts_native &&
	    res.nr_emulated == c->nr_emulated && nr_exits == c->nr_exits) {
		wanted = 0;
		wanted2 = 0;
	}

	count = res.count - base;
	EXPECT(count >= wanted && count - wanted <= slack,
	       "%s, %s: wanted %lu events, got %ld (%s by the CPU)",
	       t->name, c->config->name, wanted, (long)count,
	       counts_native ? "also counted" : "none counted");

	if (!c->run->ctrl2 || slack)
		return;

	count = res.count2 - c->count2;
	EXPECT(count == wanted2, "%s, %s: wanted %lu events in second counter, got %ld",
	       t->name, c->config->name, wanted2, (long)count);
}

struct overflow_case {
	const char *name;
	u64 nr_left;
	bool pmi;
	bool enable_globally;

	/* Deliver PMIs as ordinary interrupts, overflow a second time. */
	bool fixed;
	bool twice, unmask;
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
	{ "-1, interrupt", 1, true, false, .fixed = true },
	{ "-2, interrupt", 2, true, true, .fixed = true },
	{ "-100, interrupt", 100, true, false, .fixed = true },
	{ "-1 twice, PMI", 1, true, false, .twice = true },
	{ "-1 twice, PMI, unmasked", 1, true, false, .twice = true, .unmask = true },
	{ "-1 twice, interrupt", 1, true, false, .fixed = true, .twice = true },
	{ "-2 twice, interrupt, unmasked", 2, true, false, .fixed = true, .twice = true,
	  .unmask = true },
	{ "-1 twice, no PMI", 1, false, false, .twice = true },
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
	run->lvtpc = t->fixed ? APIC_DM_FIXED | PMI_VECTOR : APIC_DM_NMI;
	run->nr_rounds = t->twice ? 2 : 1;
	run->unmask = t->unmask;

	/* Unlike Intel CPUs, AMD CPUs don't mask LVTPC. */
	if (t->twice && (t->unmask || vendor == SVM))
		wanted_pmis *= 2;

	/*
	 * Get the number of events.  Nothing overflows, and so the setting for
	 * PMIs doesn't matter, but it must not have an effect on the next run.
	 */
	run->preset = 0;
	run->ctrl = ctrl | (t->pmi ? 0 : pmi);
	nr_exits = vcpu_get_stat(c->vcpu, exits);
	run_in_guest(c, guest_overflow);
	nr_exits = vcpu_get_stat(c->vcpu, exits) - nr_exits;
	wanted = (run->value - t->nr_left) & c->mask;
	EXPECT(!run->nr_pmis && !run->status,
	       "no overflow, %s: wanted no PMI and status 0, got %lu and 0x%lx",
	       c->config->name, run->nr_pmis, run->status);

	run->preset = -t->nr_left & c->mask;
	run->ctrl = ctrl | (t->pmi ? pmi : 0);
	nr_overflow_exits = vcpu_get_stat(c->vcpu, exits);
	run_in_guest(c, guest_overflow);
	nr_overflow_exits = vcpu_get_stat(c->vcpu, exits) - nr_overflow_exits;
	run->ctrl = ctrl;

	EXPECT(run->nr_pmis == wanted_pmis && run->status == wanted_status,
	       "overflow %s, %s: wanted %lu PMIs and status 0x%lx, got %lu and 0x%lx",
	       t->name, c->config->name, wanted_pmis, wanted_status,
	       run->nr_pmis, run->status);

	/* What the CPU counts includes the PMI's handler. */
	if (wanted_pmis && counts_native)
		return;

	/* One run may have had more exits than the other, in either direction. */
	slack = get_overcount(c, max(nr_exits, nr_overflow_exits));
	EXPECT(((run->value - wanted) & c->mask) <= slack ||
	       ((wanted - run->value) & c->mask) <= slack,
	       "overflow %s, %s: wanted count 0x%lx, got 0x%lx", t->name,
	       c->config->name, wanted, run->value);
}

static void set_event_filter(struct kvm_vm *vm, const struct counter_config *config, u32 action)
{
	struct kvm_pmu_event_filter *f;

	f = calloc(1, sizeof(*f) + sizeof(f->events[0]));
	TEST_ASSERT(f, "Failed to allocate memory for the event filter");

	f->action = action;
	if (config->flags & FIXED) {
		f->fixed_counter_bitmap = BIT(0);
	} else {
		f->nevents = 1;
		f->events[0] = eventsels[config->event][vendor];
	}

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, f);
	free(f);
}

static bool has_global_ctrl(const struct counter_config *config)
{
	if (config->flags & VERSION_1)
		return false;

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

	run->rdpmc_index = 0;
	run->counter_bit = BIT_ULL(0);
	run->ctrl = eventsels[config->event][vendor];
	if (config->flags & USER)
		run->ctrl |= ARCH_PERFMON_EVENTSEL_USR;
	if (config->flags & KERNEL)
		run->ctrl |= ARCH_PERFMON_EVENTSEL_OS;
	if (!(config->flags & DISABLED_LOCALLY))
		run->ctrl |= ARCH_PERFMON_EVENTSEL_ENABLE;

	if (config->flags & TWO_COUNTERS) {
		run->ctrl2_msr = run->ctrl_msr + 1;
		run->counter2_msr = run->counter_msr + 1;
		run->ctrl2 = (run->ctrl & ~0xffffull) | eventsels[!config->event][vendor];
	}

	if (config->flags & FIXED) {
		run->rdpmc_index = INTEL_RDPMC_FIXED;
		c->mask = BIT_ULL(kvm_cpu_property(X86_PROPERTY_PMU_FIXED_COUNTERS_BIT_WIDTH)) - 1;
		run->ctrl_msr = MSR_CORE_PERF_FIXED_CTR_CTRL;
		run->counter_msr = MSR_CORE_PERF_FIXED_CTR0;
		run->counter_bit = FIXED_PMC_GLOBAL_CTRL_ENABLE(0);
		run->ctrl = FIXED_PMC_CTRL(0, (config->flags & USER ? FIXED_PMC_USER : 0) |
					      (config->flags & KERNEL ? FIXED_PMC_KERNEL : 0));
	}

	if (!has_global_ctrl(config))
		return;

	run->global_ctrl = (config->flags & DISABLED_GLOBALLY) ? 0 : run->counter_bit;
	if (run->ctrl2 && run->global_ctrl)
		run->global_ctrl |= run->counter_bit << 1;
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

	if ((config->flags & DISABLED_GLOBALLY) && !has_global_ctrl(config))
		return false;

	if ((config->flags & NESTED) &&
	    !kvm_cpu_has(vendor == SVM ? X86_FEATURE_SVM : X86_FEATURE_VMX))
		return false;

	/* Without PERFMON_V2 there is nothing but version 1. */
	if (vendor == SVM && (config->flags & VERSION_1) && !kvm_cpu_has(X86_FEATURE_PERFMON_V2))
		return false;

	if (vendor == SVM)
		return !(config->flags & FIXED);

	if (config->flags & FIXED)
		return has_global_ctrl(config) && kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED_FIXED);

	return config->event == INSTRUCTIONS ?
	       kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED) :
	       kvm_pmu_has(X86_PMU_FEATURE_BRANCH_INSNS_RETIRED);
}

static void map_memory(struct counter *c)
{
	virt_map(c->vm, MMIO_USER_GPA, MMIO_USER_GPA, MMIO_USER_NR_PAGES);
	virt_map(c->vm, MMIO_KERNEL_GPA, MMIO_KERNEL_GPA, 1);
	virt_map(c->vm, LAST_RAM_GVA, addr_gva2gpa(c->vm, (gva_t)guest_buffer), 1);
}

static void set_up_vcpu(struct counter *c)
{
	gva_t gva;

	if ((c->config->flags & VERSION_1) && vendor == VMX)
		vcpu_set_cpuid_property(c->vcpu, X86_PROPERTY_PMU_VERSION, 1);
	else if (c->config->flags & VERSION_1)
		vcpu_clear_cpuid_feature(c->vcpu, X86_FEATURE_PERFMON_V2);

	if (!(c->config->flags & NESTED))
		return;

	/* What is returned is where userspace sees it. */
	if (vendor == SVM) {
		vcpu_alloc_svm(c->vm, &gva);
		svm = (void *)gva;
	} else {
		vcpu_alloc_vmx(c->vm, &gva);
		vmx = (void *)gva;
	}
	sync_global_to_guest(c->vm, svm);
	sync_global_to_guest(c->vm, vmx);
}

static void create_vm(struct counter *c, const struct counter_config *config)
{
	c->config = config;
	c->counts = config_counts(config);
	c->counts_vmrun = vendor == SVM;

	c->vm = vm_create_with_one_vcpu(&c->vcpu, guest_code);
	sync_global_to_guest(c->vm, vendor);
	vm_install_exception_handler(c->vm, NMI_VECTOR, guest_nmi_handler);
	vm_install_exception_handler(c->vm, PMI_VECTOR, guest_pmi_handler);
	vm_install_exception_handler(c->vm, DB_VECTOR, guest_db_handler);
	vm_install_exception_handler(c->vm, PF_VECTOR, guest_pf_handler);
	vm_enable_cap(c->vm, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_UNKNOWN);
	map_memory(c);
	set_up_vcpu(c);

	if (config->flags & (ALLOWED | DENIED))
		set_event_filter(c->vm, config, config->flags & ALLOWED ?
				 KVM_PMU_EVENT_ALLOW : KVM_PMU_EVENT_DENY);

	c->run = addr_gva2hva(c->vm, (gva_t)&guest_run);
	set_up_msrs(c);

	/* Let the guest get to its first GUEST_SYNC(). */
	run_until_sync(c);

	if (config->flags & NESTED)
		run_in_guest(c, guest_init_l2);
	run_in_guest(c, guest_probe_icebp);
	run_in_guest(c, guest_setup);
}

static void make_user_accessible(struct kvm_vm *vm, gpa_t table, int level)
{
	u64 *ptes = addr_gpa2hva(vm, table);
	int i;

	for (i = 0; i < PAGE_SIZE / sizeof(*ptes); i++) {
		if (!(ptes[i] & PTE_PRESENT_MASK(&vm->mmu)))
			continue;

		ptes[i] |= PTE_USER_MASK(&vm->mmu);
		if (level > 1 && !(ptes[i] & PTE_HUGE_MASK(&vm->mmu)))
			make_user_accessible(vm, PTE_GET_PA(ptes[i]), level - 1);
	}
}

/* From now on, execute the guest's code at CPL 3, with access to I/O ports. */
static void enter_cpl3(struct counter *c)
{
	struct kvm_sregs sregs;
	struct kvm_regs regs;
	u8 *tss;

	/* RSP for exceptions, none of which is expected. */
	tss = addr_gva2hva(c->vm, c->vm->arch.tss);
	*(u64 *)(tss + 4) = (u64)guest_stack + sizeof(guest_stack);

	make_user_accessible(c->vm, c->vm->mmu.pgd, c->vm->mmu.pgtable_levels);

	vcpu_sregs_get(c->vcpu, &sregs);
	sregs.cr4 |= X86_CR4_PCE;
	sregs.cs.dpl = 3;
	sregs.cs.selector |= 3;
	sregs.ss = sregs.ds;
	sregs.ss.dpl = 3;
	sregs.ss.selector |= 3;
	sregs.ds = sregs.ss;
	sregs.es = sregs.ss;
	vcpu_sregs_set(c->vcpu, &sregs);

	vcpu_regs_get(c->vcpu, &regs);
	/* X86_EFLAGS_IOPL is but one of the two bits. */
	regs.rflags |= X86_EFLAGS_IOPL | X86_EFLAGS_IOPL << 1;
	vcpu_regs_set(c->vcpu, &regs);
}

static void test_config(const struct counter_config *config)
{
	struct counter c = {};
	int i;

	create_vm(&c, config);

	if (config->flags & CPL3)
		enter_cpl3(&c);

	calibrate(&c);

	/* Each step exits, and so is one more VMRUN that the CPU counts. */
	if ((config->flags & SINGLE_STEP) && c.counts_vmrun && counts_native) {
		pr_info("%s: the CPU counts VMRUN, skipped\n", config->name);
		kvm_vm_free(c.vm);
		return;
	}

	for (i = 0; i < ARRAY_SIZE(test_cases); i++) {
		if (is_supported(&c, &test_cases[i]))
			test_counted(&c, &test_cases[i]);
	}

	if (config->event == INSTRUCTIONS && !(config->flags & (CPL3 | NESTED | SINGLE_STEP))) {
		for (i = 0; i < ARRAY_SIZE(overflow_cases); i++)
			test_overflow(&c, &overflow_cases[i]);
	}

	kvm_vm_free(c.vm);
}

static u64 count_insns_and_exits(struct counter *c, u64 nr_insns, u64 *nr_exits)
{
	*nr_exits = vcpu_get_stat(c->vcpu, exits);
	c->run->nr_insns = nr_insns;
	run_in_guest(c, guest_count);
	*nr_exits = vcpu_get_stat(c->vcpu, exits) - *nr_exits;

	return (c->run->count_after - c->run->count_before) & c->mask;
}

static u64 count_insns(struct counter *c, u64 nr_insns)
{
	u64 nr_exits;

	return count_insns_and_exits(c, nr_insns, &nr_exits);
}

static bool stop_flipping;

static void *flip_event_filter(void *arg)
{
	struct counter *c = arg;
	bool allow = false;

	while (!READ_ONCE(stop_flipping)) {
		set_event_filter(c->vm, c->config, allow ? KVM_PMU_EVENT_ALLOW :
							   KVM_PMU_EVENT_DENY);
		allow = !allow;
		usleep(200);
	}

	return NULL;
}

/*
 * Change the filter while the guest counts: nothing may be counted twice, and
 * what comes after the last change must be counted according to that.
 */
static void test_filter_flips(const struct counter_config *config)
{
	struct counter c = {};
	pthread_t thread;
	u64 count, all, nr_exits, nr_all_exits, slack;
	int i;

	create_vm(&c, config);
	count_insns(&c, 2000);
	all = count_insns_and_exits(&c, 2000, &nr_all_exits);

	stop_flipping = false;
	TEST_ASSERT(!pthread_create(&thread, NULL, flip_event_filter, &c),
		    "Failed to create a thread");
	for (i = 0; i < 3; i++) {
		count = count_insns_and_exits(&c, 2000, &nr_exits);
		slack = get_overcount(&c, nr_exits - min(nr_exits, nr_all_exits));
		EXPECT(count <= all || count - all <= slack,
		       "filter changes, %s: wanted at most %lu events, got %lu",
		       config->name, all, count);
	}
	WRITE_ONCE(stop_flipping, true);
	pthread_join(thread, NULL);

	for (i = 0; i < 4; i++) {
		bool allowed = i & 1;

		set_event_filter(c.vm, config, allowed ? KVM_PMU_EVENT_ALLOW :
							 KVM_PMU_EVENT_DENY);
		count = count_insns_and_exits(&c, 2000, &nr_exits);
		/* Either run may have had more exits, e.g. due to interrupts. */
		slack = allowed ? get_overcount(&c, max(nr_exits, nr_all_exits) -
						    min(nr_exits, nr_all_exits)) : 0;
		EXPECT(max(count, allowed ? all : 0) - min(count, allowed ? all : 0) <= slack,
		       "filter changes, %s: wanted %lu events, got %lu",
		       config->name, allowed ? all : 0, count);
	}

	/* What was denied must not overflow later. */
	set_event_filter(c.vm, config, KVM_PMU_EVENT_DENY);
	c.run->preset = -5ull & c.mask;
	c.run->ctrl |= ARCH_PERFMON_EVENTSEL_INT;
	run_in_guest(&c, guest_setup);
	count_insns(&c, 100);

	/* What the CPU counts would overflow on the way to reading the status. */
	if (counts_native)
		vcpu_set_msr(c.vcpu, c.run->ctrl_msr, 0);
	set_event_filter(c.vm, config, KVM_PMU_EVENT_ALLOW);
	c.run->nr_rounds = 0;
	run_in_guest(&c, guest_overflow);
	EXPECT(!c.run->nr_pmis && !c.run->status,
	       "filter changes, %s: wanted no overflow, got status 0x%lx and %lu PMIs",
	       config->name, c.run->status, c.run->nr_pmis);

	kvm_vm_free(c.vm);
}

/* Move the vCPU to a new VM. */
static void save_and_restore(struct counter *c)
{
	const u32 msrs[] = { c->run->ctrl_msr, c->run->counter_msr, c->run->ctrl2_msr,
			     c->run->counter2_msr, c->run->global_ctrl_msr,
			     c->run->global_status_msr };
	u64 values[ARRAY_SIZE(msrs)], value;
	struct kvm_x86_state *state;
	struct kvm_lapic_state apic;
	int i;

	for (i = 0; i < ARRAY_SIZE(msrs); i++)
		values[i] = msrs[i] ? vcpu_get_msr(c->vcpu, msrs[i]) : 0;
	vcpu_ioctl(c->vcpu, KVM_GET_LAPIC, &apic);
	state = vcpu_save_state(c->vcpu);
	kvm_vm_release(c->vm);

	c->vcpu = vm_recreate_with_one_vcpu(c->vm);
	vcpu_load_state(c->vcpu, state);
	vcpu_ioctl(c->vcpu, KVM_SET_LAPIC, &apic);
	kvm_x86_state_cleanup(state);

	for (i = 0; i < ARRAY_SIZE(msrs); i++) {
		if (!msrs[i])
			continue;
		value = vcpu_get_msr(c->vcpu, msrs[i]);
		EXPECT(value == values[i], "MSR 0x%x: saved 0x%lx, restored 0x%lx",
		       msrs[i], values[i], value);
	}
}

/*
 * Save and restore the vCPU after @nr_insns of 100 instructions, i.e. before or
 * after the counter wraps.
 */
static void test_save_restore(const struct counter_config *config, u64 nr_insns)
{
	u64 value[2], value2[2], status[2], nr_pmis[2];
	struct counter c;
	u64 count;
	int i;

	for (i = 0; i < 2; i++) {
		c = (struct counter) {};
		create_vm(&c, config);

		count_insns(&c, 50);
		count = count_insns(&c, 50);

		c.run->nr_rounds = 0;
		run_in_guest(&c, guest_overflow);

		c.run->preset = -count & c.mask;
		c.run->ctrl |= ARCH_PERFMON_EVENTSEL_INT;
		run_in_guest(&c, guest_setup);

		count_insns(&c, nr_insns);
		if (i)
			save_and_restore(&c);
		count_insns(&c, 100 - nr_insns);

		nr_pmis[i] = *(u64 *)addr_gva2hva(c.vm, (gva_t)&guest_nr_pmis);
		value[i] = vcpu_get_msr(c.vcpu, c.run->counter_msr) & c.mask;
		value2[i] = vcpu_get_msr(c.vcpu, c.run->counter2_msr) & c.mask;
		status[i] = c.run->global_status_msr ?
			    vcpu_get_msr(c.vcpu, c.run->global_status_msr) : 0;

		kvm_vm_free(c.vm);
	}

	EXPECT(nr_pmis[0] == 1 && nr_pmis[1] == 1,
	       "save and restore at %lu: wanted 1 PMI, got %lu without and %lu with",
	       nr_insns, nr_pmis[0], nr_pmis[1]);
	EXPECT(status[1] == status[0],
	       "save and restore at %lu: wanted status 0x%lx, got 0x%lx",
	       nr_insns, status[0], status[1]);

	/*
	 * It's up to the CPU when exactly the PMI's handler runs, and VMRUN, which
	 * AMD CPUs count, isn't executed as often in both runs.
	 */
	if (counts_native &&
	    (vendor == SVM || this_pmu_has_errata(INSTRUCTIONS_RETIRED_OVERCOUNT)))
		return;

	EXPECT(value[1] == value[0] && (value2[1] == value2[0] || counts_native),
	       "save and restore at %lu: wanted counts 0x%lx and 0x%lx, got 0x%lx and 0x%lx",
	       nr_insns, value[0], value2[0], value[1], value2[1]);
}

/*
 * A task switch by JMP, which is possible only in 32-bit mode: the first task
 * reads the counter, the second one reads it again.
 */
extern u8 task_a[], task_b[], task_end[];
asm(".pushsection .text\n\t"
	".code32\n\t"
	"task_a:\n\t"
	"rdpmc\n\t"
	"mov %eax, (%ebx)\n\t"
	"ljmp $0x20, $0\n\t"
	"task_b:\n\t"
	"rdpmc\n\t"
	"mov %eax, 4(%ebx)\n\t"
	"out %al, $0x80\n\t"
	"task_end:\n\t"
	".code64\n\t"
	".popsection");

static void set_flat_segment(struct kvm_segment *seg, u16 selector, u8 type)
{
	*seg = (struct kvm_segment) {
		.limit = -1, .selector = selector, .type = type,
		.present = 1, .db = 1, .s = 1, .g = 1,
	};
}

static void test_task_switch(const struct counter_config *config)
{
	struct counter c = {
		.config = config,
		.counts = config_counts(config),
		.counts_vmrun = vendor == SVM,
	};
	struct guest_run run = {};
	struct kvm_sregs sregs;
	struct kvm_regs regs = {};
	u32 wanted, count, *tss, *counts;
	gpa_t page;
	u64 *gdt;
	u8 *mem;

	c.vm = vm_create_with_one_vcpu(&c.vcpu, NULL);
	c.run = &run;
	set_up_msrs(&c);

	/* Code, data, the GDT, and two TSSes share a page. */
	page = vm_phy_page_alloc(c.vm, KVM_GUEST_PAGE_TABLE_MIN_PADDR, 0);
	mem = addr_gpa2hva(c.vm, page);
	memcpy(mem, task_a, task_end - task_a);
	counts = (u32 *)(mem + 0x200);
	gdt = (u64 *)(mem + 0x400);
	gdt[1] = 0x00cf9b000000ffffull;
	gdt[2] = 0x00cf93000000ffffull;
	gdt[3] = 0x00008b0000000067ull | (page + 0x600) << 16;
	gdt[4] = 0x0000890000000067ull | (page + 0x800) << 16;

	tss = (u32 *)(mem + 0x800);
	tss[8] = page + (task_b - task_a);	/* EIP */
	tss[9] = X86_EFLAGS_FIXED;
	tss[11] = run.rdpmc_index;		/* ECX */
	tss[13] = page + 0x200;			/* EBX */
	tss[14] = page + PAGE_SIZE;		/* ESP */
	tss[18] = 0x10;				/* ES, CS, SS, DS, FS, GS */
	tss[19] = 0x08;
	tss[20] = 0x10;
	tss[21] = 0x10;
	tss[22] = 0x10;
	tss[23] = 0x10;

	vcpu_sregs_get(c.vcpu, &sregs);
	sregs.cr0 = X86_CR0_PE | X86_CR0_NE;
	sregs.cr4 = 0;
	sregs.efer = 0;
	set_flat_segment(&sregs.cs, 0x08, 11);
	set_flat_segment(&sregs.ss, 0x10, 3);
	sregs.ds = sregs.ss;
	sregs.es = sregs.ss;
	sregs.fs = sregs.ss;
	sregs.gs = sregs.ss;
	sregs.gdt.base = page + 0x400;
	sregs.gdt.limit = 5 * 8 - 1;
	sregs.tr = (struct kvm_segment) {
		.base = page + 0x600, .limit = 0x67, .selector = 0x18, .type = 11, .present = 1,
	};
	vcpu_sregs_set(c.vcpu, &sregs);

	regs.rip = page;
	regs.rcx = run.rdpmc_index;
	regs.rbx = page + 0x200;
	regs.rsp = page + PAGE_SIZE;
	regs.rflags = X86_EFLAGS_FIXED;
	vcpu_regs_set(c.vcpu, &regs);

	vcpu_set_msr(c.vcpu, run.ctrl_msr, run.ctrl);
	if (run.global_ctrl_msr)
		vcpu_set_msr(c.vcpu, run.global_ctrl_msr, run.global_ctrl);

	vcpu_run(c.vcpu);
	TEST_ASSERT_KVM_EXIT_REASON(c.vcpu, KVM_EXIT_IO);
	TEST_ASSERT_EQ(c.vcpu->run->io.port, 0x80);

	/* The first RDPMC, and what isn't emulated: two MOVs. */
	count = counts[1] - counts[0];
	wanted = config->event == INSTRUCTIONS ? 1 + (counts_native ? 1 : 0) : 0;

	/* Emulators of SVM may not support the mandatory exit. */
	if (vendor == SVM && !counts_native && count == wanted)
		pr_info("Task switch, %s: not intercepted, skipped\n", config->name);
	else
		/* There are two exits between the two reads. */
		EXPECT(count - wanted - 1 <= get_overcount(&c, 2),
		       "task switch, %s: wanted %u events, got %u",
		       config->name, wanted + 1, count);

	kvm_vm_free(c.vm);
}

int main(int argc, char *argv[])
{
	static const struct counter_config two_counters = {
		"instructions and branches", INSTRUCTIONS, USER | KERNEL | TWO_COUNTERS
	};
	static const struct counter_config branches = {
		"branches", BRANCHES, USER | KERNEL
	};
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

	test_task_switch(&configs[0]);
	if (is_config_supported(&branches))
		test_task_switch(&branches);

	if (kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER))
		test_filter_flips(&configs[0]);

	if (is_config_supported(&branches)) {
		test_save_restore(&two_counters, 10);
		test_save_restore(&two_counters, 90);
	}

	TEST_ASSERT(!nr_failures, "%d checks failed", nr_failures);

	return 0;
}
