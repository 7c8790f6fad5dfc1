// SPDX-License-Identifier: GPL-2.0-only
/*
 * VM-Exit latency test
 *
 * Measure what one VM-Exit costs, in TSC ticks, for a range of exits, and how
 * the cost depends on the state of the guest's PMU: no PMU, for several ways to
 * have none, an unused PMU, a counter that counts cycles, instructions or
 * branches, and a counter behind an event filter.  The cost of exits to
 * userspace is measured with different values of the guest's EFER, too.
 *
 * The test asserts nothing about time.  It does verify that a counter which
 * counts instructions or branches moves by exactly the number of events that
 * the measured code generates, no matter if an instruction is executed by the
 * CPU or emulated by KVM, and that a denied event isn't counted at all.
 *
 * How it works: each exit has a loop of guest code, written in assembly so
 * that the compiler can't add anything to it.
 *
 *	c0 = counter
 *	t0 = TSC
 *	do {
 *		instruction(s) that exit
 *	} while (--nr);
 *	t1 = TSC
 *	c1 = counter
 *
 * The counter is read outside of the timed section, by means of RDMSR, and is
 * never stopped.  When no counter is in use, the code reads a synthetic MSR
 * instead, i.e. the very same instructions are executed for all measurements.
 * Nothing depends on the clock of the host or on the values that are measured:
 * if the TSC counts instructions, which is what some emulators do when they
 * run KVM as a guest, the results are the same each time.
 *
 * The first run of a loop only warms up, and reveals if the exit takes place,
 * as KVM doesn't intercept all instructions on all CPUs.
 */
#include <getopt.h>
#include <stdarg.h>
#include <stddef.h>
#include <termios.h>
#include <sys/eventfd.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

/* A port and pages that don't belong to any memslot or in-kernel device. */
#define PIO_USER_PORT		0xe000
#define MMIO_USER_GPA		0xd0000000ull
#define MMIO_KERNEL_GPA		0xd0001000ull
#define MMIO_FAST_GPA		0xd0002000ull

/* Edge/level control register of the in-kernel PIC, no side effects on read. */
#define PIO_KERNEL_PORT		0x4d0

/*
 * KVM's control MSR for halt polling.  As it exists only in software, no CPU
 * can virtualize it, and accesses do nothing but load or store a variable.
 */
#define SYNTHETIC_MSR		MSR_KVM_POLL_CONTROL

#define DR7_FIXED_1		0x400

#define DEFAULT_NR_EXITS	500
#define DEFAULT_NR_REPEATS	5
#define MAX_NR_EXITS		1000000
#define MAX_NR_REPEATS		1000
#define MAX_NR_COUNTERS		64
#define NR_WARMUP_EXITS		32

/*
 * What the guest shall do next, and what came out of it.  The host fills in
 * the inputs and collects the outputs while the guest waits in GUEST_SYNC().
 */
struct guest_run {
	void (*guest_code)(struct guest_run *run);

	/* Inputs of measured loops, the registers are loaded before the loop. */
	u64 nr;
	u64 rax;
	u64 rcx;
	u64 rdx;
	u32 counter_msr;

	/* The counter that the exits of the PMU's registers access. */
	u32 pmc_msr;
	u32 pmc_index;

	/* Inputs of guest_setup(). */
	u32 eventsel_msr;
	u32 global_ctrl_msr;
	u32 msr_stride;
	u32 nr_gp_counters;
	bool tsc_deadline;
	u64 eventsel;
	u64 fixed_ctrl;
	u64 global_ctrl;

	/* Outputs of measured loops. */
	u64 ticks;
	u64 count_before;
	u64 count_after;
};

static struct guest_run guest_run;

struct measured_loop {
	void (*guest_code)(struct guest_run *run);

	/* Number of exits, i.e. of emulated instructions, per iteration. */
	u32 nr_exits;

	/* Number of natively executed instructions per iteration. */
	u32 nr_native;
};

/*
 * Natively executed instructions between the two reads of the counter, besides
 * those that are part of an iteration.
 *
 * Before the loop, 3 (SHL, OR, MOV) to store the counter, 1 MOV to load the
 * number of iterations, 3 (LFENCE, RDTSC, LFENCE) plus 3 (SHL, OR, MOV) to get
 * the TSC, and 3 MOVs to load registers.
 *
 * After the loop, 3 (LFENCE, RDTSC, LFENCE) plus 4 (SHL, OR, SUB, MOV) to get
 * the TSC and store the difference, 1 MOV to load the counter's index, and 1
 * LFENCE, as a RDMSR that doesn't exit may read the counter before everything
 * in front of it has retired.
 */
#define NR_INSNS_BEFORE_LOOP	(3 + 1 + 3 + 3 + 3)
#define NR_INSNS_AFTER_LOOP	(3 + 4 + 1 + 1)

/*
 * The first RDMSR retires after it has read the counter and so is counted, the
 * second one isn't.  RDMSR is emulated by KVM unless the counter is passed
 * through to the guest, in which case it's counted by the CPU.
 */
#define NR_COUNTED_RDMSRS	1

/* DEC and JNZ */
#define NR_INSNS_OF_LOOP	2

#define RUN_OFFSET(field) \
	[off_##field] "i" (offsetof(struct guest_run, field))

#define RUN_FIELD(field)	"%c[off_" #field "](%%rdi)"

/*
 * Define a loop, @body is what is executed in each iteration, @exits is the
 * number of instructions in @body that exit and @natives the number of those
 * that don't.  @body may use and clobber RAX, RBX, RCX, and RDX.
 */
#define MEASURED_LOOP(name, exits, natives, body)			\
static void guest_##name(struct guest_run *run)				\
{									\
	asm volatile("mov " RUN_FIELD(counter_msr) ", %%ecx\n\t"	\
		     "lfence\n\t"					\
		     "rdmsr\n\t"					\
		     "shl $32, %%rdx\n\t"				\
		     "or %%rdx, %%rax\n\t"				\
		     "mov %%rax, " RUN_FIELD(count_before) "\n\t"	\
		     "mov " RUN_FIELD(nr) ", %%r8\n\t"			\
		     "lfence\n\t"					\
		     "rdtsc\n\t"					\
		     "lfence\n\t"					\
		     "shl $32, %%rdx\n\t"				\
		     "or %%rdx, %%rax\n\t"				\
		     "mov %%rax, %%r9\n\t"				\
		     "mov " RUN_FIELD(rax) ", %%rax\n\t"		\
		     "mov " RUN_FIELD(rcx) ", %%rcx\n\t"		\
		     "mov " RUN_FIELD(rdx) ", %%rdx\n\t"		\
		     "1:\n\t"						\
		     body "\n\t"					\
		     "dec %%r8\n\t"					\
		     "jnz 1b\n\t"					\
		     "lfence\n\t"					\
		     "rdtsc\n\t"					\
		     "lfence\n\t"					\
		     "shl $32, %%rdx\n\t"				\
		     "or %%rdx, %%rax\n\t"				\
		     "sub %%r9, %%rax\n\t"				\
		     "mov %%rax, " RUN_FIELD(ticks) "\n\t"		\
		     "mov " RUN_FIELD(counter_msr) ", %%ecx\n\t"	\
		     "lfence\n\t"					\
		     "rdmsr\n\t"					\
		     "shl $32, %%rdx\n\t"				\
		     "or %%rdx, %%rax\n\t"				\
		     "mov %%rax, " RUN_FIELD(count_after) "\n\t"	\
		     :: "D" (run), RUN_OFFSET(nr), RUN_OFFSET(rax),	\
			RUN_OFFSET(rcx), RUN_OFFSET(rdx),		\
			RUN_OFFSET(counter_msr), RUN_OFFSET(ticks),	\
			RUN_OFFSET(count_before),			\
			RUN_OFFSET(count_after)				\
		     : "rax", "rbx", "rcx", "rdx", "r8", "r9",		\
		       "memory", "cc");					\
}									\
									\
static const struct measured_loop loop_##name = {			\
	.guest_code = guest_##name,					\
	.nr_exits = exits,						\
	.nr_native = (natives) + NR_INSNS_OF_LOOP,			\
}

/* Not an exit, used to find out if the CPU's events are counted at all. */
MEASURED_LOOP(nop, 0, 1, "nop");

MEASURED_LOOP(cpuid, 1, 1, "xor %%eax, %%eax\n\tcpuid");
MEASURED_LOOP(rdmsr, 1, 0, "rdmsr");
MEASURED_LOOP(wrmsr, 1, 0, "wrmsr");
MEASURED_LOOP(in, 1, 0, "in %%dx, %%al");
MEASURED_LOOP(out, 1, 0, "out %%al, %%dx");
MEASURED_LOOP(store, 1, 0, "mov %%eax, (%%rdx)");
MEASURED_LOOP(wbinvd, 1, 0, "wbinvd");
MEASURED_LOOP(invd, 1, 0, "invd");
MEASURED_LOOP(mov_dr, 1, 0, "mov %%rax, %%dr7");
MEASURED_LOOP(xsetbv, 1, 0, "xsetbv");
MEASURED_LOOP(rdpmc, 1, 0, "rdpmc");

/* KVM returns the result of a hypercall in RAX, reload it each time. */
#define HYPERCALL(nr, insn)	"mov $" __stringify(nr) ", %%eax\n\t" insn "\n\t"

MEASURED_LOOP(vmcall, 1, 1, HYPERCALL(KVM_HC_VAPIC_POLL_IRQ, "vmcall"));
MEASURED_LOOP(vmmcall, 1, 1, HYPERCALL(KVM_HC_VAPIC_POLL_IRQ, "vmmcall"));
MEASURED_LOOP(vmcall_kick, 1, 1, HYPERCALL(KVM_HC_KICK_CPU, "vmcall"));
MEASURED_LOOP(vmmcall_kick, 1, 1, HYPERCALL(KVM_HC_KICK_CPU, "vmmcall"));
MEASURED_LOOP(vmcall_hlt, 2, 1, HYPERCALL(KVM_HC_KICK_CPU, "vmcall") "hlt");
MEASURED_LOOP(vmmcall_hlt, 2, 1, HYPERCALL(KVM_HC_KICK_CPU, "vmmcall") "hlt");

enum vendor {
	SVM,
	VMX,
	NR_VENDORS,
};

static enum vendor vendor;

enum counted_event {
	NO_EVENT,
	CYCLES,
	INSTRUCTIONS,
	BRANCHES,
	NR_EVENTS,
};

static const u64 eventsels[NR_EVENTS][NR_VENDORS] = {
	[CYCLES]	= { AMD_ZEN_CORE_CYCLES, INTEL_ARCH_CPU_CYCLES },
	[INSTRUCTIONS]	= { AMD_ZEN_INSTRUCTIONS_RETIRED,
			    INTEL_ARCH_INSTRUCTIONS_RETIRED },
	[BRANCHES]	= { AMD_ZEN_BRANCHES_RETIRED,
			    INTEL_ARCH_BRANCHES_RETIRED },
};

enum event_filter {
	NO_FILTER,
	ALLOW_FILTER,
	DENY_FILTER,
};

struct mode {
	const char *name;
	const char *help;
	bool no_pmu;

	/*
	 * Hide the PMU in CPUID.  On Intel, this is a way to disable it.  On
	 * AMD, the legacy counters remain.
	 */
	bool hide_pmu;

	enum counted_event event;
	enum event_filter filter;

	/* Have fixed counter 0 count, and not general purpose counters. */
	bool fixed;

	/* Have the counter ignore the guest, which runs at CPL0. */
	bool user_only;

	/* Set CPUID again, and thereby reset the PMU, while a counter is set up. */
	bool reset_pmu;

	/* Change EFER; by default only exits to userspace are measured. */
	bool change_efer;
	u64 efer_set;
	u64 efer_clear;
};

/*
 * Linux hosts run with SCE, LME, LMA, and NX set in EFER, as well as SVME if
 * SVM is in use.  The selftest's default for the guest lacks SCE.  None of the
 * page tables that the library builds uses the NX bit, i.e. NX can be cleared
 * without making it a reserved bit that is set.
 *
 * Note, EFER.SCE isn't only about EFER itself.  On Intel, KVM switches the MSRs
 * of SYSCALL on exits to userspace if, and only if, the guest has set SCE.
 */
static const struct mode modes[] = {
	{
		.name = "off",
		.help = "PMU disabled for the VM, or by kvm.enable_pmu=N",
		.no_pmu = true,
	},
	{
		.name = "off_hidden",
		.help = "off, and no PMU in CPUID",
		.no_pmu = true,
		.hide_pmu = true,
	},
	{
		.name = "hidden",
		.help = "no PMU in CPUID, all (legacy) counters unused",
		.hide_pmu = true,
	},
	{
		.name = "hidden_reset",
		.help = "hidden, since CPUID was set when a counter counted instructions",
		.hide_pmu = true,
		.reset_pmu = true,
	},
	{
		.name = "idle",
		.help = "PMU enabled, all counters unused",
	},
	{
		.name = "reset",
		.help = "idle, after CPUID was set when a counter counted instructions",
		.reset_pmu = true,
	},
	{
		.name = "cycles",
		.help = "a counter counts cycles",
		.event = CYCLES,
	},
	{
		.name = "insns",
		.help = "a counter counts instructions",
		.event = INSTRUCTIONS,
	},
	{
		.name = "branches",
		.help = "a counter counts branches",
		.event = BRANCHES,
	},
	{
		.name = "insns_fixed",
		.help = "a fixed counter counts instructions",
		.event = INSTRUCTIONS,
		.fixed = true,
	},
	{
		.name = "insns_user",
		.help = "a counter counts instructions in user mode, i.e. nothing",
		.event = INSTRUCTIONS,
		.user_only = true,
	},
	{
		.name = "filter_allow",
		.help = "insns, allowed by a filter with 300 entries",
		.event = INSTRUCTIONS,
		.filter = ALLOW_FILTER,
	},
	{
		.name = "filter_deny",
		.help = "insns, denied by a filter with 300 entries",
		.event = INSTRUCTIONS,
		.filter = DENY_FILTER,
	},
	{
		.name = "efer_same",
		.help = "idle or off, EFER.SCE and NX set as on the host",
		.change_efer = true,
		.efer_set = EFER_SCE | EFER_NX,
	},
	{
		.name = "efer_sce",
		.help = "idle or off, EFER.SCE clear, NX set",
		.change_efer = true,
		.efer_set = EFER_NX,
		.efer_clear = EFER_SCE,
	},
	{
		.name = "efer_nx",
		.help = "idle or off, EFER.SCE set, NX clear",
		.change_efer = true,
		.efer_set = EFER_SCE,
		.efer_clear = EFER_NX,
	},
};

static bool has_pmu;
static bool has_tsc_deadline;
static u32 eventsel_msr;
static u32 counter_msr;
static u32 global_ctrl_msr;
static u32 pmc_msr_stride;
static u32 nr_gp_counters;
static u32 nr_fixed_counters;

static const char *no_tsc_deadline(void)
{
	return has_tsc_deadline ? NULL : "no TSC deadline timer";
}

static const char *no_pic(void)
{
	return kvm_has_cap(KVM_CAP_IRQCHIP) ? NULL : "no in-kernel PIC";
}

static const char *no_ioeventfd(void)
{
	return kvm_has_cap(KVM_CAP_IOEVENTFD) ? NULL : "no ioeventfd";
}

static const char *no_pv_unhalt(void)
{
	/* KVM doesn't advertise the feature if HLT isn't intercepted. */
	return kvm_cpu_has(X86_FEATURE_KVM_PV_UNHALT) ? NULL : "no PV unhalt";
}

static const char *no_guest_debug(void)
{
	return kvm_has_cap(KVM_CAP_SET_GUEST_DEBUG) ? NULL : "no guest debugging";
}

static const char *no_xsave(void)
{
	return kvm_cpu_has(X86_FEATURE_XSAVE) ? NULL : "no XSAVE";
}

static void setup_xsetbv(struct guest_run *run)
{
	u64 xcr0 = kvm_cpu_supported_xcr0();

	run->rax = (u32)xcr0;
	run->rdx = xcr0 >> 32;
}

static void setup_counter(struct guest_run *run)
{
	run->rcx = run->pmc_msr;
}

static void setup_rdpmc(struct guest_run *run)
{
	run->rcx = run->pmc_index;
}

struct vm_exit {
	const char *name;
	const char *help;
	const struct measured_loop *loop[NR_VENDORS];

	/* What to subtract from the loop's results, for multi-exit loops. */
	const struct measured_loop *base[NR_VENDORS];

	/* Initial register values, if they aren't constant set by setup(). */
	u64 rax;
	u64 rcx;
	u64 rdx;
	void (*setup)(struct guest_run *run);

	/* Returns the reason why the exit can't be measured, if there is one. */
	const char *(*unsupported)(void);

	bool to_userspace;
	bool needs_pmu;
	bool writes_counter;
	bool guest_debug;
};

#define ANY_VENDOR(loop)	{ [SVM ... VMX] = &(loop) }

static const struct vm_exit exits[] = {
	{
		.name = "cpuid",
		.help = "CPUID leaf 0",
		.loop = ANY_VENDOR(loop_cpuid),
	},
	{
		.name = "rdmsr",
		.help = "RDMSR of MSR_KVM_POLL_CONTROL",
		.loop = ANY_VENDOR(loop_rdmsr),
		.rcx = SYNTHETIC_MSR,
	},
	{
		.name = "wrmsr",
		.help = "WRMSR to MSR_KVM_POLL_CONTROL",
		.loop = ANY_VENDOR(loop_wrmsr),
		.rcx = SYNTHETIC_MSR,
		.rax = 1,
	},
	{
		/* One of the MSRs that KVM writes in its VM-Exit fastpath. */
		.name = "tsc_deadline",
		.help = "WRMSR to TSC_DEADLINE, disarms the unarmed timer",
		.loop = ANY_VENDOR(loop_wrmsr),
		.rcx = MSR_IA32_TSC_DEADLINE,
		.unsupported = no_tsc_deadline,
	},
	{
		.name = "hypercall",
		.help = "VMCALL or VMMCALL, KVM_HC_VAPIC_POLL_IRQ (does nothing)",
		.loop = { [SVM] = &loop_vmmcall, [VMX] = &loop_vmcall },
	},
	{
		.name = "pio_kernel",
		.help = "IN from the in-kernel PIC",
		.loop = ANY_VENDOR(loop_in),
		.rdx = PIO_KERNEL_PORT,
		.unsupported = no_pic,
	},
	{
		.name = "pio_user",
		.help = "OUT, handled by userspace",
		.loop = ANY_VENDOR(loop_out),
		.rdx = PIO_USER_PORT,
		.to_userspace = true,
	},
	{
		/* With a length, i.e. the instruction has to be decoded. */
		.name = "mmio_kernel",
		.help = "MMIO write to a 4-byte ioeventfd",
		.loop = ANY_VENDOR(loop_store),
		.rdx = MMIO_KERNEL_GPA,
		.unsupported = no_ioeventfd,
	},
	{
		/*
		 * Any length, i.e. KVM needn't decode the instruction if the
		 * CPU provides its length.
		 */
		.name = "mmio_fast",
		.help = "MMIO write to an ioeventfd without length",
		.loop = ANY_VENDOR(loop_store),
		.rdx = MMIO_FAST_GPA,
		.unsupported = no_ioeventfd,
	},
	{
		.name = "mmio_user",
		.help = "MMIO write, handled by userspace",
		.loop = ANY_VENDOR(loop_store),
		.rdx = MMIO_USER_GPA,
		.to_userspace = true,
	},
	{
		.name = "wbinvd",
		.help = "WBINVD",
		.loop = ANY_VENDOR(loop_wbinvd),
	},
	{
		.name = "invd",
		.help = "INVD, handled in KVM's VM-Exit fastpath",
		.loop = ANY_VENDOR(loop_invd),
	},
	{
		/*
		 * A vCPU that has been kicked doesn't halt.  Unlike with an
		 * interrupt as wake event, there is neither a handler nor an
		 * EOI that would have to be accounted for, just the kick.
		 */
		.name = "hlt",
		.help = "HLT, woken by KVM_HC_KICK_CPU (whose cost is subtracted)",
		.loop = { [SVM] = &loop_vmmcall_hlt, [VMX] = &loop_vmcall_hlt },
		.base = { [SVM] = &loop_vmmcall_kick, [VMX] = &loop_vmcall_kick },
		.unsupported = no_pv_unhalt,
	},
	{
		/*
		 * Without guest debugging, KVM disables the intercept on the
		 * first access and executes the instruction natively.
		 */
		.name = "mov_dr",
		.help = "MOV to DR7, with guest debugging enabled",
		.loop = ANY_VENDOR(loop_mov_dr),
		.rax = DR7_FIXED_1,
		.unsupported = no_guest_debug,
		.guest_debug = true,
	},
	{
		.name = "xsetbv",
		.help = "XSETBV, XCR0 isn't changed",
		.loop = ANY_VENDOR(loop_xsetbv),
		.setup = setup_xsetbv,
		.unsupported = no_xsave,
	},
	{
		.name = "rdpmc",
		.help = "RDPMC of counter 0",
		.loop = ANY_VENDOR(loop_rdpmc),
		.setup = setup_rdpmc,
		.needs_pmu = true,
	},
	{
		.name = "rd_counter",
		.help = "RDMSR of counter 0",
		.loop = ANY_VENDOR(loop_rdmsr),
		.setup = setup_counter,
		.needs_pmu = true,
	},
	{
		.name = "wr_counter",
		.help = "WRMSR to counter 0, clears the counter",
		.loop = ANY_VENDOR(loop_wrmsr),
		.setup = setup_counter,
		.needs_pmu = true,
		.writes_counter = true,
	},
};

static bool run_exit[ARRAY_SIZE(exits)];
static bool run_mode[ARRAY_SIZE(modes)];
static bool exits_chosen;
static u64 nr_exits = DEFAULT_NR_EXITS;
static u64 nr_repeats = DEFAULT_NR_REPEATS;
static u64 nr_counters = 1;
static bool csv;
static const char *stat_file;

static void guest_setup(struct guest_run *run)
{
	u32 i;

	x2apic_enable();
	if (run->tsc_deadline)
		x2apic_write_reg(APIC_LVTT, APIC_LVT_TIMER_TSCDEADLINE |
					    APIC_LVT_MASKED);

	if (run->global_ctrl_msr && run->global_ctrl)
		wrmsr(run->global_ctrl_msr, run->global_ctrl);

	for (i = 0; i < run->nr_gp_counters; i++) {
		wrmsr(run->eventsel_msr + i * run->msr_stride, 0);
		wrmsr(run->pmc_msr + i * run->msr_stride, 0);
		wrmsr(run->eventsel_msr + i * run->msr_stride, run->eventsel);
	}

	if (run->fixed_ctrl) {
		wrmsr(MSR_CORE_PERF_FIXED_CTR_CTRL, 0);
		wrmsr(MSR_CORE_PERF_FIXED_CTR0, 0);
		wrmsr(MSR_CORE_PERF_FIXED_CTR_CTRL, run->fixed_ctrl);
	}
}

static void guest_code(void)
{
	void (*code)(struct guest_run *run);

	for (;;) {
		GUEST_SYNC(0);

		code = READ_ONCE(guest_run.guest_code);
		code(&guest_run);
	}
}

/* State of the VM that runs the measurements of one mode. */
struct bench {
	const struct mode *mode;
	struct kvm_vm *vm;
	struct kvm_vcpu *vcpu;
	struct guest_run *run;
	bool has_pmu;
	bool counts_native;
	u64 stat_overhead;
	int kernel_eventfd;
	int fast_eventfd;
};

struct sample {
	u64 ticks;
	u64 count;
	u64 exits;
	u64 stat;
};

/* Userspace exits are done as cheaply as possible, i.e. not by vcpu_run(). */
static void run_until_sync(struct bench *b)
{
	struct kvm_run *run = b->vcpu->run;
	struct ucall uc;
	int r;

	for (;;) {
		r = __vcpu_run(b->vcpu);
		if (r && errno == EINTR)
			continue;

		TEST_ASSERT(!r, KVM_IOCTL_ERROR(KVM_RUN, r));

		if (run->exit_reason == KVM_EXIT_IO &&
		    run->io.port == PIO_USER_PORT)
			continue;

		if (run->exit_reason == KVM_EXIT_MMIO &&
		    run->mmio.phys_addr == MMIO_USER_GPA)
			continue;

		switch (get_ucall(b->vcpu, &uc)) {
		case UCALL_SYNC:
			return;
		case UCALL_ABORT:
			REPORT_GUEST_ASSERT(uc);
			break;
		default:
			TEST_FAIL("Unexpected exit reason: %u (%s)",
				  run->exit_reason,
				  exit_reason_str(run->exit_reason));
		}
	}
}

static int read_number(const char *path, u64 *value)
{
	char buf[32] = {};
	char *end;
	ssize_t r;
	int fd;

	fd = open(path, O_RDONLY);
	if (fd < 0)
		return -errno;

	r = read(fd, buf, sizeof(buf) - 1);
	if (r < 0)
		r = -errno;
	close(fd);
	if (r < 0)
		return r;

	errno = 0;
	*value = strtoull(buf, &end, 0);
	if (errno || end == buf || (*end && *end != '\n'))
		return -EINVAL;

	return 0;
}

static u64 read_stat(void)
{
	u64 value;
	int r;

	if (!stat_file)
		return 0;

	r = read_number(stat_file, &value);
	TEST_ASSERT(!r, "Failed to read a number from '%s', error: %d (%s)",
		    stat_file, -r, strerror(-r));
	return value;
}

static void run_loop(struct bench *b, const struct measured_loop *loop, u64 nr,
		     struct sample *s)
{
	struct guest_run *run = b->run;

	run->guest_code = loop->guest_code;
	run->nr = nr;

	s->exits = vcpu_get_stat(b->vcpu, exits);
	s->stat = read_stat();

	run_until_sync(b);

	/* Don't count what the exits around the loop contribute. */
	s->stat = read_stat() - s->stat;
	s->stat -= min(s->stat, b->stat_overhead);

	s->exits = vcpu_get_stat(b->vcpu, exits) - s->exits;
	s->ticks = run->ticks;
	s->count = run->count_after - run->count_before;
}

/*
 * Get the number of events that the code generates outside of the exits, i.e.
 * what an iteration adds to the counter without the exit(s) that are part of
 * it, times @nr, plus the constant overhead.
 */
static u64 get_overhead(struct bench *b, const struct measured_loop *loop, u64 nr)
{
	u64 overhead;

	switch (b->mode->event) {
	case INSTRUCTIONS:
		if (b->mode->filter == DENY_FILTER || b->mode->user_only)
			return 0;

		overhead = NR_COUNTED_RDMSRS;
		if (b->counts_native)
			overhead += NR_INSNS_BEFORE_LOOP + NR_INSNS_AFTER_LOOP +
				    loop->nr_native * nr;
		return overhead;
	case BRANCHES:
		/* One JNZ per iteration. */
		return b->counts_native ? nr : 0;
	default:
		return 0;
	}
}

/*
 * Get the difference by which the actual count may exceed the expected one.
 * Some Intel CPUs overcount instructions and/or branches on VM-Entry/VM-Exit.
 * AMD CPUs count VMRUN for the guest, as an instruction and as a branch, which
 * is architectural.
 */
static u64 get_overcount(struct bench *b, const struct sample *s)
{
	if (!b->counts_native || b->mode->filter == DENY_FILTER)
		return 0;

	switch (b->mode->event) {
	case INSTRUCTIONS:
		if (this_pmu_has_errata(INSTRUCTIONS_RETIRED_OVERCOUNT))
			return -1ull;
		return vendor == SVM ? s->exits : 0;
	case BRANCHES:
		if (this_pmu_has_errata(BRANCHES_RETIRED_OVERCOUNT))
			return -1ull;
		return vendor == SVM ? s->exits : 0;
	default:
		return 0;
	}
}

static void check_count(struct bench *b, const struct vm_exit *e,
			const struct measured_loop *loop, const struct sample *s)
{
	u64 count = s->count, wanted, slack = get_overcount(b, s);

	switch (b->mode->event) {
	case INSTRUCTIONS:
		wanted = get_overhead(b, loop, nr_exits);
		if (b->mode->filter != DENY_FILTER && !b->mode->user_only)
			wanted += loop->nr_exits * nr_exits;
		break;
	case BRANCHES:
		/* None of the emulated instructions is a branch. */
		wanted = get_overhead(b, loop, nr_exits);
		break;
	default:
		/* KVM doesn't emulate cycles, and how many is up to the CPU. */
		return;
	}

	/*
	 * The last of the writes leaves the counter at zero, what counts is
	 * the writing instruction itself and everything after it.
	 */
	if (e->writes_counter) {
		count = b->run->count_after;
		if (wanted && b->mode->event == INSTRUCTIONS)
			wanted = 1 + (b->counts_native ? NR_INSNS_OF_LOOP +
							 NR_INSNS_AFTER_LOOP : 0);
		else if (wanted)
			wanted = 1;
	}

	TEST_ASSERT(count >= wanted && count - wanted <= slack,
		    "%s, %s: wanted %lu events for %lu exits, got %lu (the CPU's own events are%s counted)",
		    e->name, b->mode->name, wanted, loop->nr_exits * nr_exits,
		    count, b->counts_native ? "" : "n't");
}

/*
 * Find out what is counted if there are no exits.
 *
 * The CPU's own events may be missing.  In an emulator without a PMU, KVM can
 * be made to believe in one that counts nothing, so that all that's left are
 * the events that KVM emulates.  Either all of the events that the loop
 * generates are counted, or just the RDMSR at its beginning.
 */
static void calibrate(struct bench *b)
{
	u64 native, emulated, overhead = -1ull;
	struct sample s;
	int i;

	/* Let KVM create and schedule a perf event, if it uses perf events. */
	run_loop(b, &loop_nop, nr_exits, &s);

	/* The least is what is left without, e.g., the task being preempted. */
	for (i = 0; i < nr_repeats; i++) {
		run_loop(b, &loop_nop, nr_exits, &s);
		overhead = min(overhead, s.stat);
	}
	b->stat_overhead = overhead;

	if (b->mode->event != INSTRUCTIONS && b->mode->event != BRANCHES)
		return;

	emulated = get_overhead(b, &loop_nop, nr_exits);
	b->counts_native = true;
	native = get_overhead(b, &loop_nop, nr_exits);

	if (s.count == emulated) {
		b->counts_native = false;
		return;
	}

	TEST_ASSERT(s.count >= native && s.count - native <= get_overcount(b, &s),
		    "%s: wanted %lu events (or %lu if the CPU's aren't counted) for %lu NOPs, got %lu",
		    b->mode->name, native, emulated, nr_exits, s.count);
}

struct result {
	double ticks_min;
	double ticks_median;
	double counted;
	double stat;
};

static int cmp_u64(const void *a, const void *b)
{
	u64 x = *(const u64 *)a, y = *(const u64 *)b;

	return x < y ? -1 : x > y;
}

/* Sort @values, and return the median. */
static double sort_values(u64 *values)
{
	qsort(values, nr_repeats, sizeof(*values), cmp_u64);

	return (values[(nr_repeats - 1) / 2] + values[nr_repeats / 2]) / 2.0;
}

/* Add @sign times the results of @loop, per exit, to @res. */
static void measure_loop(struct bench *b, const struct vm_exit *e,
			 const struct measured_loop *loop, int sign,
			 struct result *res)
{
	u64 *ticks, *counts, *stats;
	double per_exit = (double)sign / nr_exits;
	struct sample s;
	int i;

	ticks = calloc(3 * nr_repeats, sizeof(*ticks));
	TEST_ASSERT(ticks, "Failed to allocate memory for the samples");
	counts = ticks + nr_repeats;
	stats = counts + nr_repeats;

	for (i = 0; i < nr_repeats; i++) {
		run_loop(b, loop, nr_exits, &s);
		check_count(b, e, loop, &s);

		ticks[i] = s.ticks;
		counts[i] = s.count - get_overhead(b, loop, nr_exits);
		stats[i] = s.stat;
	}

	res->ticks_median += sort_values(ticks) * per_exit;
	res->ticks_min += ticks[0] * per_exit;
	res->counted += sort_values(counts) * per_exit;
	res->stat += sort_values(stats) * per_exit;

	free(ticks);
}

/* Returns the reason why the exit isn't measured, NULL if it has been. */
static const char *measure_exit(struct bench *b, const struct vm_exit *e,
				struct result *res)
{
	struct kvm_guest_debug debug = { .control = KVM_GUESTDBG_ENABLE };
	const struct measured_loop *loop = e->loop[vendor];
	u64 nr = min_t(u64, nr_exits, NR_WARMUP_EXITS);
	const char *reason = NULL;
	struct sample s;

	if (e->needs_pmu && !b->has_pmu)
		return "the VM has no PMU";

	if (e->unsupported)
		reason = e->unsupported();
	if (reason)
		return reason;

	b->run->rax = e->rax;
	b->run->rcx = e->rcx;
	b->run->rdx = e->rdx;
	if (e->setup)
		e->setup(b->run);

	if (e->guest_debug)
		vcpu_guest_debug_set(b->vcpu, &debug);

	memset(res, 0, sizeof(*res));

	run_loop(b, loop, nr, &s);
	if (s.exits < loop->nr_exits * nr) {
		reason = "not intercepted";
	} else {
		measure_loop(b, e, loop, 1, res);
		if (e->base[vendor])
			measure_loop(b, e, e->base[vendor], -1, res);

		/*
		 * Noise can make the difference of two minimums exceed that of
		 * the medians.
		 */
		res->ticks_min = min(res->ticks_min, res->ticks_median);
	}

	if (e->guest_debug) {
		debug.control = 0;
		vcpu_guest_debug_set(b->vcpu, &debug);
	}

	return reason;
}

static int create_ioeventfd(struct kvm_vm *vm, gpa_t gpa, u32 len)
{
	struct kvm_ioeventfd ioeventfd = {
		.addr = gpa,
		.len = len,
		.fd = kvm_new_eventfd(),
	};

	vm_ioctl(vm, KVM_IOEVENTFD, &ioeventfd);
	return ioeventfd.fd;
}

/*
 * Fill the largest possible filter with @eventsel and events that nobody uses
 * here.  Fixed counters don't matter, the test doesn't use them either.
 */
static void set_event_filter(struct kvm_vm *vm, enum event_filter filter,
			     u64 eventsel)
{
	struct kvm_pmu_event_filter *f;
	int i, nr = 0;

	f = calloc(1, sizeof(*f) + KVM_PMU_EVENT_FILTER_MAX_EVENTS * sizeof(f->events[0]));
	TEST_ASSERT(f, "Failed to allocate memory for the event filter");

	f->action = filter == ALLOW_FILTER ? KVM_PMU_EVENT_ALLOW :
					     KVM_PMU_EVENT_DENY;
	f->nevents = KVM_PMU_EVENT_FILTER_MAX_EVENTS;
	f->events[nr++] = eventsel;
	for (i = 0; nr < f->nevents; i++) {
		if ((i & ARCH_PERFMON_EVENTSEL_EVENT) != (eventsel & ARCH_PERFMON_EVENTSEL_EVENT))
			f->events[nr++] = RAW_EVENT(i & 0xff, i >> 8);
	}

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, f);
	free(f);
}

static void change_efer(struct kvm_vcpu *vcpu, const struct mode *mode)
{
	struct kvm_sregs sregs;

	vcpu_sregs_get(vcpu, &sregs);
	sregs.efer |= mode->efer_set;
	sregs.efer &= ~mode->efer_clear;
	vcpu_sregs_set(vcpu, &sregs);
}

static void hide_pmu(struct kvm_vcpu *vcpu)
{
	const struct kvm_cpuid2 *cpuid = kvm_get_supported_cpuid();
	int i;

	for (i = 0; i < cpuid->nent; i++) {
		u32 function = cpuid->entries[i].function;

		if (function == X86_PROPERTY_PMU_VERSION.function ||
		    function == X86_FEATURE_PERFMON_V2.function)
			vcpu_clear_cpuid_entry(vcpu, function);
	}

	vcpu_clear_cpuid_feature(vcpu, X86_FEATURE_PDCM);
	vcpu_clear_cpuid_feature(vcpu, X86_FEATURE_PERFCTR_CORE);
}

/* As a VMM that restores MSRs before it has set CPUID for the last time. */
static void reset_pmu(struct kvm_vcpu *vcpu, bool hide)
{
	vcpu_set_msr(vcpu, eventsel_msr, eventsels[INSTRUCTIONS][vendor] |
					 ARCH_PERFMON_EVENTSEL_OS |
					 ARCH_PERFMON_EVENTSEL_USR |
					 ARCH_PERFMON_EVENTSEL_ENABLE);
	if (hide)
		hide_pmu(vcpu);
	else
		vcpu_set_cpuid(vcpu);
	TEST_ASSERT_EQ(vcpu_get_msr(vcpu, eventsel_msr), 0);
}

/* General purpose counters first, the fixed counter is the last resort. */
static void program_counters(struct guest_run *run, const struct mode *mode)
{
	bool fixed = mode->fixed || nr_counters > nr_gp_counters;

	run->eventsel_msr = eventsel_msr;
	run->msr_stride = pmc_msr_stride;
	run->global_ctrl_msr = global_ctrl_msr;
	run->eventsel = eventsels[mode->event][vendor] |
			ARCH_PERFMON_EVENTSEL_USR |
			ARCH_PERFMON_EVENTSEL_ENABLE;
	if (!mode->user_only)
		run->eventsel |= ARCH_PERFMON_EVENTSEL_OS;

	if (!mode->fixed)
		run->nr_gp_counters = min_t(u64, nr_counters, nr_gp_counters);
	run->global_ctrl = BIT_ULL(run->nr_gp_counters) - 1;

	if (fixed) {
		run->fixed_ctrl = FIXED_PMC_CTRL(0, FIXED_PMC_KERNEL | FIXED_PMC_USER);
		run->global_ctrl |= FIXED_PMC_GLOBAL_CTRL_ENABLE(0);
	}
	if (mode->fixed) {
		run->pmc_msr = MSR_CORE_PERF_FIXED_CTR0;
		run->pmc_index = INTEL_RDPMC_FIXED;
	}
	run->counter_msr = run->pmc_msr;
}

static u64 max_nr_counters(const struct mode *mode)
{
	if (mode->fixed)
		return 1;

	/* Of the fixed counters, only the one for instructions is made use of. */
	return nr_gp_counters +
	       (mode->event == INSTRUCTIONS && !mode->user_only && nr_fixed_counters);
}

static void create_bench(struct bench *b, const struct mode *mode)
{
	struct guest_run *run;

	memset(b, 0, sizeof(*b));
	b->mode = mode;
	b->has_pmu = has_pmu && !mode->no_pmu && !mode->hide_pmu;
	b->kernel_eventfd = -1;
	b->fast_eventfd = -1;

	/*
	 * The capability must be enabled before vCPUs are created, and can't be
	 * enabled if there's no PMU in the first place.
	 */
	b->vm = vm_create(1);
	if (has_pmu && mode->no_pmu)
		vm_enable_cap(b->vm, KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE);
	if (mode->filter)
		set_event_filter(b->vm, mode->filter, eventsels[mode->event][vendor]);

	b->vcpu = vm_vcpu_add(b->vm, 0, guest_code);
	if (has_tsc_deadline)
		vcpu_set_cpuid_feature(b->vcpu, X86_FEATURE_TSC_DEADLINE_TIMER);
	if (mode->reset_pmu)
		reset_pmu(b->vcpu, mode->hide_pmu);
	else if (mode->hide_pmu)
		hide_pmu(b->vcpu);
	if (mode->change_efer)
		change_efer(b->vcpu, mode);

	virt_map(b->vm, MMIO_USER_GPA, MMIO_USER_GPA, 1);
	virt_map(b->vm, MMIO_KERNEL_GPA, MMIO_KERNEL_GPA, 1);
	virt_map(b->vm, MMIO_FAST_GPA, MMIO_FAST_GPA, 1);
	if (kvm_has_cap(KVM_CAP_IOEVENTFD)) {
		b->kernel_eventfd = create_ioeventfd(b->vm, MMIO_KERNEL_GPA, 4);
		b->fast_eventfd = create_ioeventfd(b->vm, MMIO_FAST_GPA, 0);
	}

	run = addr_gva2hva(b->vm, (gva_t)&guest_run);
	b->run = run;
	memset(run, 0, sizeof(*run));

	/* Let the guest get to its first GUEST_SYNC(). */
	run_until_sync(b);

	run->guest_code = guest_setup;
	run->tsc_deadline = has_tsc_deadline;
	run->counter_msr = SYNTHETIC_MSR;
	run->pmc_msr = counter_msr;
	if (mode->event)
		program_counters(run, mode);
	run_until_sync(b);

	calibrate(b);
}

static void free_bench(struct bench *b)
{
	kvm_vm_free(b->vm);
	if (b->kernel_eventfd >= 0)
		close(b->kernel_eventfd);
	if (b->fast_eventfd >= 0)
		close(b->fast_eventfd);
}

static const char *mode_unsupported(const struct mode *mode)
{
	struct kvm_x86_pmu_feature event;

	if (mode->no_pmu || mode->change_efer)
		return NULL;

	if (!has_pmu)
		return "KVM provides no PMU, all VMs run in mode off";

	if (mode->filter && !kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER))
		return "KVM provides no PMU event filter";

	if (mode->fixed && !nr_fixed_counters)
		return "the PMU has no fixed counters";

	if (mode->event && nr_counters > max_nr_counters(mode))
		return "there aren't as many counters for the event";

	/* All AMD CPUs have all of the events. */
	if (vendor == SVM || (!mode->event && !mode->reset_pmu))
		return NULL;

	switch (mode->reset_pmu ? INSTRUCTIONS : mode->event) {
	case CYCLES:
		event = X86_PMU_FEATURE_CPU_CYCLES;
		break;
	case INSTRUCTIONS:
		event = X86_PMU_FEATURE_INSNS_RETIRED;
		break;
	case BRANCHES:
		event = X86_PMU_FEATURE_BRANCH_INSNS_RETIRED;
		break;
	default:
		TEST_FAIL("Unknown event: %u", mode->event);
	}

	return kvm_pmu_has(event) ? NULL : "the PMU lacks the event";
}

static void init_pmu(void)
{
	vendor = host_cpu_is_amd_compatible ? SVM : VMX;
	has_pmu = kvm_is_pmu_enabled();
	has_tsc_deadline = kvm_has_cap(KVM_CAP_TSC_DEADLINE_TIMER);

	if (vendor == VMX) {
		has_pmu = has_pmu &&
			  kvm_cpu_property(X86_PROPERTY_PMU_VERSION) &&
			  kvm_cpu_property(X86_PROPERTY_PMU_NR_GP_COUNTERS);

		eventsel_msr = MSR_P6_EVNTSEL0;
		counter_msr = MSR_IA32_PERFCTR0;
		pmc_msr_stride = 1;
		if (!has_pmu)
			return;

		nr_gp_counters = kvm_cpu_property(X86_PROPERTY_PMU_NR_GP_COUNTERS);
		if (kvm_cpu_property(X86_PROPERTY_PMU_VERSION) >= 2) {
			global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL;
			nr_fixed_counters = kvm_cpu_property(X86_PROPERTY_PMU_NR_FIXED_COUNTERS);
		}
		return;
	}

	if (kvm_cpu_has(X86_FEATURE_PERFCTR_CORE)) {
		eventsel_msr = MSR_F15H_PERF_CTL0;
		counter_msr = MSR_F15H_PERF_CTR0;
		pmc_msr_stride = 2;
		nr_gp_counters = 6;
	} else {
		eventsel_msr = MSR_K7_EVNTSEL0;
		counter_msr = MSR_K7_PERFCTR0;
		pmc_msr_stride = 1;
		nr_gp_counters = 4;
	}
	if (kvm_cpu_has(X86_FEATURE_PERFMON_V2)) {
		global_ctrl_msr = MSR_AMD64_PERF_CNTR_GLOBAL_CTL;
		nr_gp_counters = kvm_cpu_property(X86_PROPERTY_NR_PERFCTR_CORE);
	}
}

static void print_header(void)
{
	if (csv) {
		printf("exit,pmu,ticks_min,ticks_median,counted%s\n",
		       stat_file ? ",stat" : "");
		return;
	}

	printf("# TSC ticks per exit, %lu repeats of %lu exits\n",
	       nr_repeats, nr_exits);
	printf("# counted: events per exit, without those of the loop around it\n");
	if (stat_file)
		printf("# stat: rise of %s per exit\n", stat_file);
	printf("%-14s%-14s%12s%12s%10s%s\n", "exit", "pmu", "minimum",
	       "median", "counted", stat_file ? "      stat" : "");
}

/*
 * If the output goes to a console that is driven by interrupts, don't let them
 * get in the way of the next measurement.
 */
static void drain_output(void)
{
	fflush(stdout);
	if (isatty(STDOUT_FILENO))
		tcdrain(STDOUT_FILENO);
}

static void print_result(const struct vm_exit *e, const struct mode *mode,
			 const struct result *res)
{
	char line[128], counted[32] = "-";
	int len;

	if (mode->event && !e->writes_counter)
		snprintf(counted, sizeof(counted), "%.2f", res->counted);

	len = snprintf(line, sizeof(line),
		       csv ? "%s,%s,%.1f,%.1f,%s" : "%-14s%-14s%12.1f%12.1f%10s",
		       e->name, mode->name, res->ticks_min, res->ticks_median,
		       counted);
	if (stat_file)
		snprintf(line + len, sizeof(line) - len,
			 csv ? ",%.2f" : "%10.2f", res->stat);

	puts(line);
	drain_output();
}

static void print_skipped(const struct vm_exit *e, const struct mode *mode,
			  const char *reason)
{
	printf("# skip: %s,%s: %s\n", e->name, mode->name, reason);
	drain_output();
}

static bool is_chosen(const struct vm_exit *e, const struct mode *mode)
{
	if (mode->change_efer && !e->to_userspace && !exits_chosen)
		return false;

	return run_exit[e - exits];
}

/* Returns the number of exits that have been measured. */
static int run_mode_exits(const struct mode *mode)
{
	const char *skip_mode = mode_unsupported(mode), *reason;
	struct result res;
	struct bench b;
	int i, nr = 0;

	if (!skip_mode)
		create_bench(&b, mode);

	for (i = 0; i < ARRAY_SIZE(exits); i++) {
		if (!is_chosen(&exits[i], mode))
			continue;

		reason = skip_mode ?: measure_exit(&b, &exits[i], &res);
		if (reason) {
			print_skipped(&exits[i], mode, reason);
			continue;
		}

		print_result(&exits[i], mode, &res);
		nr++;
	}

	if (!skip_mode)
		free_bench(&b);

	return nr;
}

static void print_usage(FILE *out, const char *name)
{
	fprintf(out,
		"usage: %s [-e EXITS] [-m MODES] [-k COUNTERS] [-n NUMBER] [-r REPEATS] [-s FILE] [-c] [-l] [-h]\n"
		"Measure the cost of VM-Exits in TSC ticks.\n"
		" -e: comma-separated list of the exits to measure (default: all)\n"
		" -m: comma-separated list of the modes of the PMU (default: all)\n"
		" -k: number of counters that count, in modes in which one does (default: 1)\n"
		" -n: number of exits per measurement (default: %d)\n"
		" -r: number of measurements per line of the output (default: %d)\n"
		" -s: file that holds a number, e.g. /sys/kernel/debug/kvm/exits; adds a\n"
		"     column with its rise per exit\n"
		" -c: print comma-separated values\n"
		" -l: list the exits and modes\n"
		" -h: print this help\n",
		name, DEFAULT_NR_EXITS, DEFAULT_NR_REPEATS);
}

static void __noreturn __printf(2, 3)
usage_error(const char *name, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fprintf(stderr, "%s: ", name);
	vfprintf(stderr, fmt, ap);
	fprintf(stderr, "\n");
	va_end(ap);

	print_usage(stderr, name);
	exit(KSFT_FAIL);
}

static u64 parse_number(const char *name, const char *what, const char *str,
			u64 max)
{
	unsigned long long value;
	char *end;

	errno = 0;
	value = strtoull(str, &end, 10);
	if (errno || *end || str[0] < '0' || str[0] > '9' || !value || value > max)
		usage_error(name, "%s must be a number from 1 to %lu, not '%s'",
			    what, max, str);

	return value;
}

static int find_exit(const char *name)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(exits); i++) {
		if (!strcmp(exits[i].name, name))
			return i;
	}
	return -1;
}

static int find_mode(const char *name)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(modes); i++) {
		if (!strcmp(modes[i].name, name))
			return i;
	}
	return -1;
}

static void parse_list(const char *name, const char *what, char *list,
		       int (*find)(const char *name), bool *chosen)
{
	char *item;
	int i;

	if (!*list)
		usage_error(name, "the list of %ss is empty", what);

	while ((item = strsep(&list, ","))) {
		i = find(item);
		if (i < 0)
			usage_error(name, "unknown %s '%s' (-l lists all)",
				    what, item);
		chosen[i] = true;
	}
}

static void list_all(void)
{
	int i;

	printf("exits:\n");
	for (i = 0; i < ARRAY_SIZE(exits); i++)
		printf("  %-14s%s\n", exits[i].name, exits[i].help);

	printf("modes:\n");
	for (i = 0; i < ARRAY_SIZE(modes); i++)
		printf("  %-14s%s\n", modes[i].name, modes[i].help);

	printf("The efer modes measure only exits to userspace, unless -e names others.\n");
}

int main(int argc, char *argv[])
{
	bool modes_chosen = false;
	int opt, i, r, nr = 0;
	u64 value;

	while ((opt = getopt(argc, argv, "e:k:m:n:r:s:clh")) != -1) {
		switch (opt) {
		case 'e':
			parse_list(argv[0], "exit", optarg, find_exit, run_exit);
			exits_chosen = true;
			break;
		case 'm':
			parse_list(argv[0], "mode", optarg, find_mode, run_mode);
			modes_chosen = true;
			break;
		case 'k':
			nr_counters = parse_number(argv[0], "the number of counters",
						   optarg, MAX_NR_COUNTERS);
			break;
		case 'n':
			nr_exits = parse_number(argv[0], "the number of exits",
						optarg, MAX_NR_EXITS);
			break;
		case 'r':
			nr_repeats = parse_number(argv[0], "the number of repeats",
						  optarg, MAX_NR_REPEATS);
			break;
		case 's':
			stat_file = optarg;
			r = read_number(stat_file, &value);
			if (r)
				usage_error(argv[0], "can't read a number from '%s': %s",
					    stat_file, strerror(-r));
			break;
		case 'c':
			csv = true;
			break;
		case 'l':
			list_all();
			exit(KSFT_PASS);
		case 'h':
			print_usage(stdout, argv[0]);
			exit(KSFT_PASS);
		default:
			print_usage(stderr, argv[0]);
			exit(KSFT_FAIL);
		}
	}
	if (optind < argc)
		usage_error(argv[0], "unexpected argument '%s'", argv[optind]);

	if (!exits_chosen)
		memset(run_exit, true, sizeof(run_exit));
	if (!modes_chosen)
		memset(run_mode, true, sizeof(run_mode));

	__TEST_REQUIRE(this_cpu_has(X86_FEATURE_VMX) || this_cpu_has(X86_FEATURE_SVM),
		       "the CPU has neither VMX nor SVM");
	TEST_REQUIRE(kvm_has_cap(KVM_CAP_BINARY_STATS_FD));

	init_pmu();
	pin_self_to_any_cpu();
	print_header();

	for (i = 0; i < ARRAY_SIZE(modes); i++) {
		if (run_mode[i])
			nr += run_mode_exits(&modes[i]);
	}

	__TEST_REQUIRE(nr, "nothing to measure");

	return KSFT_PASS;
}
