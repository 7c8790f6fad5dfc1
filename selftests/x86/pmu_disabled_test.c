// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a disabled PMU is disabled, for the guest and for userspace
 *
 * There are many ways to run a VM without a PMU: userspace disables the PMU of
 * the VM, hides it in CPUID, or both, KVM's module parameter disables it for
 * all VMs, or KVM itself has to do without.  Userspace may also leave the PMU
 * in CPUID even though there is none, and may set CPUID more than once, with
 * accesses to PMU MSRs in between.  For each of the ways, and for a PMU that is
 * on, as the contrast, verify
 *
 *  - what the guest gets when it accesses MSRs and counters, at all CPLs,
 *  - what userspace gets when it saves and restores MSRs,
 *  - that emulated instructions are counted, and generate a PMI, only if there
 *    is a PMU, with and without an event filter.
 *
 * What to expect isn't spelled out for each of the ways.  Rather, each of them
 * results in a virtual PMU with certain properties, all of which are zero if
 * the PMU is off, and a table says how each MSR behaves with and without the
 * property that brings it into existence.
 *
 * The guest and userspace's ioctls only record what happens, all checks are
 * done afterwards, so that -v can print the full matrix first.
 */
#include <getopt.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

#define APIC_LVTPC		0x340

/* The selftests' library has no name for it. */
#define X86_FEATURE_DS		KVM_X86_CPU_FEATURE(0x1, 0, EDX, 21)

#define AMD64_NR_COUNTERS	4
#define AMD64_NR_COUNTERS_CORE	6

/* Selectors of code and data at CPL 3, behind those that the library uses. */
#define USER_CS			(0x28 | 3)
#define USER_DS			(0x30 | 3)
#define USER_CS_DESC		0x00affb000000ffffull
#define USER_DS_DESC		0x00cff3000000ffffull
#define X86_EFLAGS_IOPL_3	(3ul << 12)

enum vendor {
	SVM,
	VMX,
};

static enum vendor vendor;
static bool is_mediated;
static bool verbose;

/* What a vCPU's PMU consists of.  All zero: there is none. */
struct vpmu {
	/* Version 1 on AMD stands for a PMU without global controls. */
	int version;
	int nr_gp;
	int nr_fixed;

	/* AMD: MSRs of the core counters, not only of the legacy ones. */
	bool has_core;

	/*
	 * These don't depend on the PMU, they are what CPUID says and KVM
	 * supports.  IA32_PERF_CAPABILITIES is zero if it doesn't exist.
	 */
	bool has_pdcm;
	bool has_ds;
	u64 perf_caps;
};

/* --- MSRs --- */

struct msr_desc {
	const char *name;
	u32 base;
	int nr;
	int stride;

	/* Index, in terms of @exists, of the MSR at @base. */
	int first;

	enum vendor vendor;
	bool (*exists)(const struct vpmu *pmu, int idx);

	/*
	 * If it doesn't exist, the MSR usually doesn't exist at all: the guest
	 * gets a #GP, and userspace an error.  But userspace may read zero from
	 * and write zero to all MSRs that KVM lists.  Some MSRs never fault,
	 * the ones of AMD's and Intel's first CPUs with counters: if they don't
	 * exist, they read as zero and ignore all writes, be they made by the
	 * guest or userspace, on CPUs of either vendor.
	 */
	bool never_faults;

	/* The value that the MSR has initially, zero if not set. */
	u64 (*reset)(const struct vpmu *pmu);

	/*
	 * A value that may be written and doesn't enable any counter, and one
	 * with reserved bits, if there are any.  Reserved bits either fault, or
	 * are dropped.
	 */
	u64 valid;
	u64 (*get_valid)(const struct vpmu *pmu);
	u64 reserved;
	bool drops_reserved;

	/* Writes have an effect, but not on what the MSR itself reads as. */
	bool reads_zero;

	/* The guest may only read the MSR, its writes fault or are ignored. */
	bool guest_ro_faults;
	bool guest_ro_ignores;

	/*
	 * A mediated PMU may give the guest access to the CPU's register.  Not
	 * all CPUs treat reserved bits and write-only registers alike.
	 */
	bool maybe_native;
};

static bool has_gp(const struct vpmu *pmu, int idx)
{
	return idx < pmu->nr_gp;
}

static bool has_core(const struct vpmu *pmu, int idx)
{
	return pmu->has_core && idx < pmu->nr_gp;
}

static bool has_full_width(const struct vpmu *pmu, int idx)
{
	return idx < pmu->nr_gp && pmu->perf_caps & PMU_CAP_FW_WRITES;
}

static bool has_fixed(const struct vpmu *pmu, int idx)
{
	return idx < pmu->nr_fixed;
}

static bool has_global(const struct vpmu *pmu, int idx)
{
	return pmu->version >= 2;
}

static bool has_perf_caps(const struct vpmu *pmu, int idx)
{
	return pmu->has_pdcm;
}

static bool has_pebs(const struct vpmu *pmu, int idx)
{
	return pmu->perf_caps & PERF_CAP_PEBS_FORMAT;
}

static bool has_pebs_baseline(const struct vpmu *pmu, int idx)
{
	return pmu->perf_caps & PERF_CAP_PEBS_BASELINE &&
	       (pmu->perf_caps & PERF_CAP_PEBS_FORMAT) > (3 << 8);
}

static bool has_ds(const struct vpmu *pmu, int idx)
{
	return pmu->has_ds;
}

static bool has_nothing(const struct vpmu *pmu, int idx)
{
	return false;
}

static u64 all_gp(const struct vpmu *pmu)
{
	return BIT_ULL(pmu->nr_gp) - 1;
}

static u64 get_perf_caps(const struct vpmu *pmu)
{
	return pmu->perf_caps;
}

/*
 * Values that are valid if the MSR exists, and that aren't zero if it doesn't,
 * as writing zero is a case of its own.
 */
static u64 valid_perf_caps(const struct vpmu *pmu)
{
	return pmu->has_pdcm ? pmu->perf_caps : PMU_CAP_FW_WRITES;
}

static u64 valid_fixed_ctrl(const struct vpmu *pmu)
{
	if (has_global(pmu, 0) && !pmu->nr_fixed)
		return 0;

	return FIXED_PMC_CTRL(0, FIXED_PMC_ENABLE_PMI);
}

/*
 * The MSRs of PEBS exist if PERF_CAPABILITIES says so.  If there is no PMU
 * nonetheless, all of their bits are reserved.
 */
static u64 valid_pebs_enable(const struct vpmu *pmu)
{
	return has_pebs(pmu, 0) && !has_global(pmu, 0) ? 0 : BIT_ULL(0);
}

static u64 valid_pebs_data_cfg(const struct vpmu *pmu)
{
	return has_pebs_baseline(pmu, 0) && !has_global(pmu, 0) ? 0 : BIT_ULL(1);
}

/* Instructions, INT, but not EN; the number is the same on both vendors. */
#define IDLE_EVENTSEL	(INTEL_ARCH_INSTRUCTIONS_RETIRED |		\
			 ARCH_PERFMON_EVENTSEL_OS |			\
			 ARCH_PERFMON_EVENTSEL_USR |			\
			 ARCH_PERFMON_EVENTSEL_INT)

/* Fits into 31 bits, i.e. isn't sign-extended. */
#define COUNT		0x1234

static const struct msr_desc msr_descs[] = {
	{
		.name = "P6_PERFCTR", .base = MSR_P6_PERFCTR0, .nr = 2,
		.vendor = VMX, .exists = has_gp, .never_faults = true,
		.valid = COUNT,
	},
	{
		.name = "IA32_PERFCTR", .base = MSR_IA32_PERFCTR0 + 2, .nr = 6,
		.first = 2, .vendor = VMX, .exists = has_gp, .valid = COUNT,
	},
	{
		.name = "P6_EVNTSEL", .base = MSR_P6_EVNTSEL0, .nr = 2,
		.vendor = VMX, .exists = has_gp, .never_faults = true,
		.valid = IDLE_EVENTSEL, .reserved = BIT_ULL(63),
	},
	{
		.name = "IA32_EVENTSEL", .base = MSR_P6_EVNTSEL0 + 2, .nr = 6,
		.first = 2, .vendor = VMX, .exists = has_gp,
		.valid = IDLE_EVENTSEL, .reserved = BIT_ULL(63),
	},
	{
		.name = "IA32_PMC", .base = MSR_IA32_PMC0, .nr = 8,
		.vendor = VMX, .exists = has_full_width,
		.valid = COUNT, .reserved = BIT_ULL(63),
	},
	{
		.name = "FIXED_CTR", .base = MSR_CORE_PERF_FIXED_CTR0, .nr = 4,
		.vendor = VMX, .exists = has_fixed, .valid = COUNT,
	},
	{
		.name = "FIXED_CTR_CTRL", .base = MSR_CORE_PERF_FIXED_CTR_CTRL,
		.nr = 1, .vendor = VMX, .exists = has_global,
		.get_valid = valid_fixed_ctrl, .reserved = BIT_ULL(63),
	},
	{
		.name = "GLOBAL_STATUS", .base = MSR_CORE_PERF_GLOBAL_STATUS,
		.nr = 1, .vendor = VMX, .exists = has_global,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.guest_ro_faults = true,
	},
	{
		.name = "GLOBAL_CTRL", .base = MSR_CORE_PERF_GLOBAL_CTRL,
		.nr = 1, .vendor = VMX, .exists = has_global, .reset = all_gp,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
	},
	{
		.name = "GLOBAL_OVF_CTRL", .base = MSR_CORE_PERF_GLOBAL_OVF_CTRL,
		.nr = 1, .vendor = VMX, .exists = has_global,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.reads_zero = true, .maybe_native = true,
	},
	{
		.name = "PERF_CAPABILITIES", .base = MSR_IA32_PERF_CAPABILITIES,
		.nr = 1, .vendor = VMX, .exists = has_perf_caps,
		.reset = get_perf_caps, .get_valid = valid_perf_caps,
		.reserved = BIT_ULL(63), .guest_ro_faults = true,
	},
	{
		.name = "PEBS_ENABLE", .base = MSR_IA32_PEBS_ENABLE, .nr = 1,
		.vendor = VMX, .exists = has_pebs,
		.get_valid = valid_pebs_enable, .reserved = BIT_ULL(63),
	},
	{
		.name = "PEBS_DATA_CFG", .base = MSR_PEBS_DATA_CFG, .nr = 1,
		.vendor = VMX, .exists = has_pebs_baseline,
		.get_valid = valid_pebs_data_cfg, .reserved = BIT_ULL(63),
	},
	{
		.name = "DS_AREA", .base = MSR_IA32_DS_AREA, .nr = 1,
		.vendor = VMX, .exists = has_ds,
		.valid = 0x1000, .reserved = BIT_ULL(63),
	},
	{
		.name = "K7_EVNTSEL", .base = MSR_K7_EVNTSEL0, .nr = 4,
		.vendor = SVM, .exists = has_gp, .never_faults = true,
		.valid = IDLE_EVENTSEL,
		.reserved = BIT_ULL(63), .drops_reserved = true,
	},
	{
		.name = "K7_PERFCTR", .base = MSR_K7_PERFCTR0, .nr = 4,
		.vendor = SVM, .exists = has_gp, .never_faults = true,
		.valid = COUNT,
	},
	{
		.name = "PERF_CTL", .base = MSR_F15H_PERF_CTL, .nr = 6,
		.stride = 2, .vendor = SVM, .exists = has_core,
		.valid = IDLE_EVENTSEL,
		.reserved = BIT_ULL(63), .drops_reserved = true,
	},
	{
		.name = "PERF_CTR", .base = MSR_F15H_PERF_CTR, .nr = 6,
		.stride = 2, .vendor = SVM, .exists = has_core,
		.valid = COUNT,
	},
	{
		/* KVM virtualizes no more than six counters. */
		.name = "PERF_CTL", .base = MSR_F15H_PERF_CTL + 12, .nr = 1,
		.first = 6, .vendor = SVM, .exists = has_nothing,
		.valid = IDLE_EVENTSEL,
	},
	{
		.name = "PERF_CTR", .base = MSR_F15H_PERF_CTR + 12, .nr = 1,
		.first = 6, .vendor = SVM, .exists = has_nothing,
		.valid = COUNT,
	},
	{
		.name = "CNTR_GLOBAL_STATUS",
		.base = MSR_AMD64_PERF_CNTR_GLOBAL_STATUS, .nr = 1,
		.vendor = SVM, .exists = has_global,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.guest_ro_ignores = true, .maybe_native = true,
	},
	{
		.name = "CNTR_GLOBAL_CTL",
		.base = MSR_AMD64_PERF_CNTR_GLOBAL_CTL, .nr = 1,
		.vendor = SVM, .exists = has_global, .reset = all_gp,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.drops_reserved = true, .maybe_native = true,
	},
	{
		.name = "CNTR_GLOBAL_STATUS_SET",
		.base = MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_SET, .nr = 1,
		.vendor = SVM, .exists = has_global,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.drops_reserved = true, .reads_zero = true,
		.maybe_native = true,
	},
	{
		.name = "CNTR_GLOBAL_STATUS_CLR",
		.base = MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR, .nr = 1,
		.vendor = SVM, .exists = has_global,
		.valid = BIT_ULL(0), .reserved = BIT_ULL(31),
		.drops_reserved = true, .reads_zero = true,
		.maybe_native = true,
	},
};

#define MAX_NR_MSRS	128

enum msr_op {
	READ,
	WRITE_ZERO,
	WRITE_VALID,
	WRITE_RESERVED,
	NR_OPS,
};

static const char * const op_names[NR_OPS] = {
	[READ]		= "read",
	[WRITE_ZERO]	= "write of 0",
	[WRITE_VALID]	= "write of a valid value",
	[WRITE_RESERVED] = "write with reserved bits",
};

/* An MSR could be read before it was written to, but not afterwards. */
#define UNREADABLE	0xff

/* What came out of an access, and what the MSR reads as afterwards. */
struct msr_result {
	/* The guest's exception vector, or 1 if userspace's ioctl has failed. */
	u8 failed;
	u64 value;
};

struct msr_access {
	u32 msr;
	u64 values[NR_OPS];
	struct msr_result results[NR_OPS];
};

struct msr {
	const struct msr_desc *desc;
	int idx;
	struct msr_access guest;
	struct msr_access user;
	bool is_listed;
};

static struct msr msrs[MAX_NR_MSRS];
static int nr_msrs;

/* --- RDPMC --- */

/*
 * All general purpose counters that any vendor might have, Intel's fixed
 * counters, its "metrics" and the flag for "fast" reads, indices that look as
 * if they had high bits to be ignored, and VMware's pseudo counters.
 */
static const u32 pmc_indices[] = {
	0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
	16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
	INTEL_RDPMC_FIXED, INTEL_RDPMC_FIXED | 1, INTEL_RDPMC_FIXED | 2,
	INTEL_RDPMC_FIXED | 3, INTEL_RDPMC_FIXED | 31,
	INTEL_RDPMC_METRICS, INTEL_RDPMC_FAST, INTEL_RDPMC_FAST | 1,
	INTEL_RDPMC_FAST | INTEL_RDPMC_FIXED,
	32, 64, 255, 256, 0xffff, 0x10000, 0x10001, 0x10002, 0x10003,
	0x3fffffff, 0x7fffffff, 0xffffffff,
};

#define VMWARE_PMC_FIRST	0x10000
#define VMWARE_PMC_LAST		0x10002

struct pmc_read {
	u8 vector;
	u64 value;
};

enum pmc_mode {
	CPL0,
	CPL0_PCE,
	CPL3,
	CPL3_PCE,
	NR_PMC_MODES,
};

static const char * const pmc_mode_names[NR_PMC_MODES] = {
	[CPL0]		= "CPL 0, CR4.PCE=0",
	[CPL0_PCE]	= "CPL 0, CR4.PCE=1",
	[CPL3]		= "CPL 3, CR4.PCE=0",
	[CPL3_PCE]	= "CPL 3, CR4.PCE=1",
};

/* --- the guest --- */

#define NR_CPUIDS	50
#define PRESET		((u64)-10)

struct msr_write {
	u32 msr;
	u64 value;
};

/* What the guest shall do next, and what came out of it. */
struct guest_run {
	void (*guest_code)(struct guest_run *run);

	struct msr_access accesses[MAX_NR_MSRS];
	int nr_accesses;

	struct pmc_read pmcs[ARRAY_SIZE(pmc_indices)];

	/* Inputs and outputs of guest_emulate(). */
	struct msr_write writes[2 * MAX_NR_MSRS];
	int nr_writes;
	u64 before[MAX_NR_MSRS];
	u64 after[MAX_NR_MSRS];
	u64 nr_nmis;
};

static struct guest_run guest_run;
static u64 guest_nr_nmis;

static void guest_access_msrs(struct guest_run *run)
{
	int i, op;

	for (i = 0; i < run->nr_accesses; i++) {
		struct msr_access *a = &run->accesses[i];
		struct msr_result *r = a->results;

		r[READ].failed = rdmsr_safe(a->msr, &r[READ].value);
		if (r[READ].failed)
			r[READ].value = 0;

		for (op = WRITE_ZERO; op < NR_OPS; op++) {
			r[op].failed = wrmsr_safe(a->msr, a->values[op]);

			r[op].value = 0;
			if (!r[READ].failed &&
			    rdmsr_safe(a->msr, &r[op].value))
				r[op].failed = UNREADABLE;
		}

		wrmsr_safe(a->msr, 0);
	}
}

static void guest_read_pmcs(struct guest_run *run)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(pmc_indices); i++)
		run->pmcs[i].vector = rdpmc_safe(pmc_indices[i],
						 &run->pmcs[i].value);
}

static void guest_nmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_nmis, guest_nr_nmis + 1);
}

static void guest_read_msrs(struct guest_run *run, u64 *values)
{
	int i;

	for (i = 0; i < run->nr_accesses; i++) {
		if (rdmsr_safe(run->accesses[i].msr, &values[i]))
			values[i] = 0;
	}
}

static void guest_emulate(struct guest_run *run)
{
	u64 nr_nmis = READ_ONCE(guest_nr_nmis);
	u32 eax, ebx, ecx, edx;
	int i;

	x2apic_enable();
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

	for (i = 0; i < run->nr_writes; i++)
		wrmsr_safe(run->writes[i].msr, run->writes[i].value);

	guest_read_msrs(run, run->before);
	for (i = 0; i < NR_CPUIDS; i++)
		__cpuid(0, 0, &eax, &ebx, &ecx, &edx);
	guest_read_msrs(run, run->after);

	for (i = 0; i < run->nr_writes; i++)
		wrmsr_safe(run->writes[i].msr, 0);

	run->nr_nmis = READ_ONCE(guest_nr_nmis) - nr_nmis;
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

static void run_until_sync(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);

	switch (get_ucall(vcpu, &uc)) {
	case UCALL_SYNC:
		break;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("Unexpected exit reason: %u (%s)",
			  vcpu->run->exit_reason,
			  exit_reason_str(vcpu->run->exit_reason));
	}
}

static struct guest_run *get_guest_run(struct kvm_vcpu *vcpu)
{
	return addr_gva2hva(vcpu->vm, (gva_t)&guest_run);
}

static void run_guest(struct kvm_vcpu *vcpu,
		      void (*code)(struct guest_run *run))
{
	get_guest_run(vcpu)->guest_code = code;
	run_until_sync(vcpu);
}

static void make_user_accessible(struct kvm_vm *vm, gpa_t table, int level)
{
	u64 *ptes = addr_gpa2hva(vm, table);
	int i;

	for (i = 0; i < PAGE_SIZE / sizeof(*ptes); i++) {
		if (!(ptes[i] & PTE_PRESENT_MASK(&vm->mmu)))
			continue;

		ptes[i] |= PTE_USER_MASK(&vm->mmu);
		if (level > PG_LEVEL_4K && !(ptes[i] & PTE_HUGE_MASK(&vm->mmu)))
			make_user_accessible(vm, PTE_GET_PA(ptes[i]), level - 1);
	}
}

/* Allow the vCPU to run at CPL 3, and to get from there to CPL 0 and back. */
static void prepare_cpl3(struct kvm_vm *vm)
{
	u64 *gdt = addr_gva2hva(vm, vm->arch.gdt);
	void *tss = addr_gva2hva(vm, vm->arch.tss);
	u64 rsp0 = vm_alloc_page(vm) + PAGE_SIZE;

	gdt[USER_CS >> 3] = USER_CS_DESC;
	gdt[USER_DS >> 3] = USER_DS_DESC;

	/* RSP0 is at offset 4. */
	memcpy(tss + 4, &rsp0, sizeof(rsp0));

	make_user_accessible(vm, vm->mmu.pgd, vm->mmu.pgtable_levels);
}

/*
 * Change the CPL behind the guest's back.  IOPL=3 allows code at CPL 3 to do
 * ucalls, which use port I/O.
 */
static void set_cpl(struct kvm_vcpu *vcpu, const struct kvm_sregs *cpl0,
		    int cpl, bool pce)
{
	struct kvm_sregs sregs;
	struct kvm_regs regs;

	vcpu_sregs_get(vcpu, &sregs);
	sregs.cs = cpl0->cs;
	sregs.ss = cpl0->ds;
	if (cpl) {
		sregs.cs.selector = USER_CS;
		sregs.cs.dpl = cpl;
		sregs.ss.selector = USER_DS;
		sregs.ss.dpl = cpl;
	}
	sregs.cr4 = pce ? sregs.cr4 | X86_CR4_PCE : sregs.cr4 & ~X86_CR4_PCE;
	vcpu_sregs_set(vcpu, &sregs);

	vcpu_regs_get(vcpu, &regs);
	regs.rflags |= X86_EFLAGS_IOPL_3;
	vcpu_regs_set(vcpu, &regs);
}

/* --- the ways to configure a PMU --- */

enum cpuid_pmu {
	/* What KVM_GET_SUPPORTED_CPUID says. */
	CPUID_DEFAULT,

	/* Nothing that has to do with a PMU is left. */
	CPUID_NONE,

	/* Whatever a careless userspace could claim. */
	CPUID_ALL,

	/* The least number of counters that is possible. */
	CPUID_FEW,
};

struct way {
	const char *name;
	const char *help;

	/* Enable KVM_CAP_PMU_CAPABILITY with KVM_PMU_CAP_DISABLE. */
	bool cap_disable;

	/* Don't create an in-kernel APIC. */
	bool no_apic;

	/*
	 * CPUID, and what it was set to before, with userspace writing to the
	 * PMU's MSRs in between.  The library sets CPUID_DEFAULT before.
	 */
	enum cpuid_pmu cpuid;
	int nr_before;
	enum cpuid_pmu before[2];
};

static const struct way ways[] = {
	{
		.name = "default",
		.help = "CPUID as KVM supports it",
	},
	{
		.name = "few",
		.help = "CPUID with the least number of counters",
		.cpuid = CPUID_FEW,
	},
	{
		.name = "again",
		.help = "CPUID as KVM supports it, was with and without PMU before",
		.nr_before = 2,
		.before = { CPUID_DEFAULT, CPUID_NONE },
	},
	{
		.name = "cap",
		.help = "KVM_PMU_CAP_DISABLE, CPUID without PMU",
		.cap_disable = true,
		.cpuid = CPUID_NONE,
	},
	{
		.name = "cap_default",
		.help = "KVM_PMU_CAP_DISABLE, CPUID as KVM supports it",
		.cap_disable = true,
	},
	{
		.name = "cap_all",
		.help = "KVM_PMU_CAP_DISABLE, CPUID with all of a PMU",
		.cap_disable = true,
		.cpuid = CPUID_ALL,
	},
	{
		.name = "cap_twice",
		.help = "KVM_PMU_CAP_DISABLE, CPUID was with PMU before",
		.cap_disable = true,
		.cpuid = CPUID_NONE,
		.nr_before = 1,
		.before = { CPUID_ALL },
	},
	{
		.name = "cpuid",
		.help = "CPUID without PMU",
		.cpuid = CPUID_NONE,
	},
	{
		.name = "cpuid_twice",
		.help = "CPUID without PMU, was with PMU before",
		.cpuid = CPUID_NONE,
		.nr_before = 1,
		.before = { CPUID_DEFAULT },
	},
	{
		.name = "no_apic",
		.help = "no in-kernel APIC, which a mediated PMU needs",
		.no_apic = true,
	},
	{
		.name = "no_apic_all",
		.help = "no in-kernel APIC, CPUID with all of a PMU",
		.no_apic = true,
		.cpuid = CPUID_ALL,
	},
	{
		.name = "all",
		.help = "CPUID with all of a PMU, whatever KVM supports",
		.cpuid = CPUID_ALL,
	},
};

/*
 * AMD: a CPU has the legacy counters, unconditionally.  CPUID has no bit that
 * says there are none.
 */
static bool way_is_off(const struct way *way)
{
	if (!kvm_is_pmu_enabled() || way->cap_disable)
		return true;

	if (way->no_apic && is_mediated)
		return true;

	return vendor == VMX && way->cpuid == CPUID_NONE;
}

static bool has_perfmon_v2(void)
{
	return kvm_cpu_has(X86_FEATURE_PERFMON_V2);
}

static bool way_is_possible(const struct way *way)
{
	/*
	 * The capability can't be enabled, and CPUID_FEW isn't any different
	 * from CPUID_DEFAULT.
	 */
	if (!kvm_is_pmu_enabled())
		return !way->cap_disable && way->cpuid != CPUID_FEW;

	/* The number of counters follows from the version. */
	if (way->cpuid == CPUID_FEW && vendor == SVM)
		return has_perfmon_v2();

	return true;
}

static void get_vpmu(const struct way *way, struct vpmu *pmu)
{
	memset(pmu, 0, sizeof(*pmu));

	/* KVM neither takes away nor adds what CPUID says by itself. */
	if (vendor == VMX && way->cpuid != CPUID_NONE) {
		pmu->has_pdcm = kvm_cpu_has(X86_FEATURE_PDCM);
		pmu->has_ds = kvm_cpu_has(X86_FEATURE_DS);
		if (pmu->has_pdcm)
			pmu->perf_caps = kvm_get_feature_msr(MSR_IA32_PERF_CAPABILITIES);
	}

	if (way_is_off(way))
		return;

	if (vendor == VMX) {
		pmu->version = kvm_cpu_property(X86_PROPERTY_PMU_VERSION);
		pmu->nr_gp = kvm_cpu_property(X86_PROPERTY_PMU_NR_GP_COUNTERS);
		if (way->cpuid == CPUID_FEW)
			pmu->nr_gp = 1;
		if (pmu->version >= 2)
			pmu->nr_fixed = kvm_cpu_property(X86_PROPERTY_PMU_NR_FIXED_COUNTERS);
		if (way->cpuid == CPUID_FEW)
			pmu->nr_fixed = min(pmu->nr_fixed, 1);
		return;
	}

	pmu->version = 1;
	pmu->nr_gp = AMD64_NR_COUNTERS;
	if (way->cpuid == CPUID_NONE)
		return;

	pmu->has_core = kvm_cpu_has(X86_FEATURE_PERFCTR_CORE);
	if (pmu->has_core)
		pmu->nr_gp = AMD64_NR_COUNTERS_CORE;
	if (has_perfmon_v2()) {
		pmu->version = 2;
		if (way->cpuid == CPUID_FEW)
			pmu->nr_gp = 1;
		else
			pmu->nr_gp = kvm_cpu_property(X86_PROPERTY_NR_PERFCTR_CORE);
	}
}

static void change_feature(struct kvm_cpuid2 *cpuid,
			   struct kvm_x86_cpu_feature feature, bool set)
{
	u32 *regs = &((struct kvm_cpuid_entry2 *)
		      get_cpuid_entry(cpuid, feature.function, feature.index))->eax;

	if (set)
		regs[feature.reg] |= BIT(feature.bit);
	else
		regs[feature.reg] &= ~BIT(feature.bit);
}

static void change_property(struct kvm_cpuid2 *cpuid,
			    struct kvm_x86_cpu_property property, u32 value)
{
	u32 *regs = &((struct kvm_cpuid_entry2 *)
		      get_cpuid_entry(cpuid, property.function, property.index))->eax;

	regs[property.reg] &= ~GENMASK(property.hi_bit, property.lo_bit);
	regs[property.reg] |= value << property.lo_bit;
}

static bool has_cpuid_entry(const struct kvm_cpuid2 *cpuid, u32 function)
{
	int i;

	for (i = 0; i < cpuid->nent; i++) {
		if (cpuid->entries[i].function == function)
			return true;
	}

	return false;
}

static void clear_cpuid_entry(struct kvm_cpuid2 *cpuid, u32 function)
{
	struct kvm_cpuid_entry2 *e;

	if (!has_cpuid_entry(cpuid, function))
		return;

	e = (void *)get_cpuid_entry(cpuid, function, 0);
	e->eax = 0;
	e->ebx = 0;
	e->ecx = 0;
	e->edx = 0;
}

static void set_cpuid(struct kvm_vcpu *vcpu, enum cpuid_pmu cpuid_pmu)
{
	const struct kvm_cpuid2 *supported = kvm_get_supported_cpuid();
	struct kvm_cpuid2 *cpuid = vcpu->cpuid;

	memcpy(cpuid, supported, kvm_cpuid2_size(supported->nent));

	switch (cpuid_pmu) {
	case CPUID_DEFAULT:
		break;
	case CPUID_NONE:
		clear_cpuid_entry(cpuid, 0xa);
		clear_cpuid_entry(cpuid, 0x80000022);
		change_feature(cpuid, X86_FEATURE_PERFCTR_CORE, false);
		change_feature(cpuid, X86_FEATURE_PDCM, false);
		change_feature(cpuid, X86_FEATURE_DS, false);
		break;
	case CPUID_ALL:
		if (has_cpuid_entry(cpuid, 0xa) &&
		    !kvm_cpu_property(X86_PROPERTY_PMU_VERSION)) {
			change_property(cpuid, X86_PROPERTY_PMU_VERSION, 2);
			change_property(cpuid, X86_PROPERTY_PMU_NR_GP_COUNTERS, 8);
			change_property(cpuid, X86_PROPERTY_PMU_GP_COUNTERS_BIT_WIDTH, 48);
			change_property(cpuid, X86_PROPERTY_PMU_EBX_BIT_VECTOR_LENGTH, 7);
			change_property(cpuid, X86_PROPERTY_PMU_NR_FIXED_COUNTERS, 3);
			change_property(cpuid, X86_PROPERTY_PMU_FIXED_COUNTERS_BIT_WIDTH, 48);
		}
		if (has_cpuid_entry(cpuid, 0x80000022) && !has_perfmon_v2()) {
			change_feature(cpuid, X86_FEATURE_PERFMON_V2, true);
			change_property(cpuid, X86_PROPERTY_NR_PERFCTR_CORE,
					AMD64_NR_COUNTERS_CORE);
		}
		change_feature(cpuid, X86_FEATURE_PERFCTR_CORE, true);
		change_feature(cpuid, X86_FEATURE_PDCM, true);
		change_feature(cpuid, X86_FEATURE_DS, true);
		break;
	case CPUID_FEW:
		if (vendor == SVM) {
			change_property(cpuid, X86_PROPERTY_NR_PERFCTR_CORE, 1);
			break;
		}
		change_property(cpuid, X86_PROPERTY_PMU_NR_GP_COUNTERS, 1);
		if (kvm_cpu_property(X86_PROPERTY_PMU_NR_FIXED_COUNTERS))
			change_property(cpuid, X86_PROPERTY_PMU_NR_FIXED_COUNTERS, 1);
		break;
	default:
		TEST_FAIL("Unknown CPUID: %u", cpuid_pmu);
	}

	vcpu_set_cpuid(vcpu);
}

static struct kvm_vm *create_vm(const struct way *way, struct kvm_vcpu **vcpu)
{
	struct kvm_vm *vm;

	/* The library's VMs do have an APIC. */
	vm = way->no_apic ? vm_create_barebones() : vm_create(1);

	if (way->cap_disable)
		vm_enable_cap(vm, KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE);

	if (way->no_apic) {
		*vcpu = __vm_vcpu_add(vm, 0);
		vcpu_init_cpuid(*vcpu, kvm_get_supported_cpuid());
	} else {
		*vcpu = vm_vcpu_add(vm, 0, guest_code);
	}

	return vm;
}

/* --- userspace's view --- */

static bool get_msr(struct kvm_vcpu *vcpu, u32 msr, u64 *value)
{
	struct {
		struct kvm_msrs header;
		struct kvm_msr_entry entry;
	} buffer = {
		.header.nmsrs = 1,
		.entry.index = msr,
		/* Reading has to yield a value, not leave the old one alone. */
		.entry.data = 0xdeadbeefull,
	};
	int r;

	r = __vcpu_ioctl(vcpu, KVM_GET_MSRS, &buffer.header);
	TEST_ASSERT(r == 0 || r == 1, "KVM_GET_MSRS of MSR 0x%x: wanted 0 or 1, got %d (errno %d)",
		    msr, r, errno);
	*value = r ? buffer.entry.data : 0;
	return r;
}

static bool set_msr(struct kvm_vcpu *vcpu, u32 msr, u64 value)
{
	int r = _vcpu_set_msr(vcpu, msr, value);

	TEST_ASSERT(r == 0 || r == 1, "KVM_SET_MSRS of MSR 0x%x: wanted 0 or 1, got %d (errno %d)",
		    msr, r, errno);
	return r;
}

/*
 * Leave something behind that CPUID has to get rid of: enabled counters, with a
 * value.  IA32_PERF_CAPABILITIES and the MSRs of PEBS aren't reset by CPUID.
 */
static void fill_msrs(struct kvm_vcpu *vcpu, bool has_pmu)
{
	u64 value;
	int i;

	for (i = 0; i < nr_msrs; i++) {
		const struct msr_desc *d = msrs[i].desc;

		if (d->exists == has_perf_caps || d->exists == has_ds ||
		    d->exists == has_pebs || d->exists == has_pebs_baseline)
			continue;

		if (d->base == MSR_CORE_PERF_FIXED_CTR_CTRL)
			value = FIXED_PMC_CTRL(0, FIXED_PMC_KERNEL | FIXED_PMC_ENABLE_PMI);
		else if (d->valid == IDLE_EVENTSEL)
			value = IDLE_EVENTSEL | ARCH_PERFMON_EVENTSEL_ENABLE;
		else
			value = d->valid;

		/* Fails if there's no such MSR, which is checked elsewhere. */
		set_msr(vcpu, msrs[i].user.msr, value);
	}

	if (!has_pmu)
		return;

	value = vcpu_get_msr(vcpu, vendor == VMX ? MSR_P6_EVNTSEL0 : MSR_K7_EVNTSEL0);
	TEST_ASSERT_EQ(value, IDLE_EVENTSEL | ARCH_PERFMON_EVENTSEL_ENABLE);
}

static void set_way_cpuid(struct kvm_vcpu *vcpu, const struct way *way)
{
	bool has_pmu = kvm_is_pmu_enabled() && !way->cap_disable;
	int i;

	for (i = 0; i < way->nr_before; i++) {
		set_cpuid(vcpu, way->before[i]);
		fill_msrs(vcpu, has_pmu && way->before[i] == CPUID_DEFAULT);
	}
	set_cpuid(vcpu, way->cpuid);
}

static void user_access_msrs(struct kvm_vcpu *vcpu)
{
	int i, op;

	for (i = 0; i < nr_msrs; i++) {
		struct msr_access *a = &msrs[i].user;
		struct msr_result *r = a->results;

		r[READ].failed = !get_msr(vcpu, a->msr, &r[READ].value);

		for (op = WRITE_ZERO; op < NR_OPS; op++) {
			r[op].failed = !set_msr(vcpu, a->msr, a->values[op]);
			r[op].value = 0;
			if (!r[READ].failed &&
			    !get_msr(vcpu, a->msr, &r[op].value))
				r[op].failed = UNREADABLE;
		}

		/* Also leaves the MSR as it was. */
		TEST_ASSERT(r[READ].failed ||
			    set_msr(vcpu, a->msr, r[READ].value),
			    "%s (MSR 0x%x): can't write 0x%lx, which was read before",
			    msrs[i].desc->name, a->msr, r[READ].value);
	}
}

/* A VMM that saves what KVM lists can restore it. */
static void check_save_restore(struct kvm_vcpu *vcpu, const struct way *way)
{
	const struct kvm_msr_list *list = kvm_get_msr_index_list();
	u64 value;
	int i;

	for (i = 0; i < list->nmsrs; i++) {
		TEST_ASSERT(get_msr(vcpu, list->indices[i], &value),
			    "%s: MSR 0x%x is listed, but can't be read",
			    way->name, list->indices[i]);
		TEST_ASSERT(set_msr(vcpu, list->indices[i], value),
			    "%s: MSR 0x%x is listed, but 0x%lx can't be written back",
			    way->name, list->indices[i], value);
	}
}

/* --- what is expected --- */

static bool exists(const struct msr *m, const struct vpmu *pmu)
{
	return m->desc->vendor == vendor && m->desc->exists(pmu, m->idx);
}

/*
 * Get the expected result of @op, given that the operations before it had their
 * expected results.
 */
static struct msr_result expect(const struct msr *m, const struct vpmu *pmu,
				enum msr_op op, bool guest)
{
	const struct msr_access *a = guest ? &m->guest : &m->user;
	const struct msr_desc *d = m->desc;
	struct msr_result r = {};
	enum msr_op i;

	if (!exists(m, pmu)) {
		if (d->never_faults)
			return r;
		if (guest)
			r.failed = GP_VECTOR;
		else
			r.failed = !m->is_listed ||
				   (op != READ && a->values[op]);
		return r;
	}

	r.value = d->reset ? d->reset(pmu) : 0;
	for (i = WRITE_ZERO; i <= op; i++) {
		r.failed = 0;

		if (guest && d->guest_ro_faults)
			r.failed = GP_VECTOR;
		else if (guest && d->guest_ro_ignores)
			continue;
		else if (i == WRITE_RESERVED && d->reserved && !d->drops_reserved)
			r.failed = guest ? GP_VECTOR : 1;
		else if (i == WRITE_RESERVED)
			r.value = a->values[WRITE_VALID];
		else
			r.value = a->values[i];
	}

	if (d->reads_zero)
		r.value = 0;

	return r;
}

static const char *result_str(const struct msr_result *r, bool guest)
{
	static char bufs[4][32];
	static int i;
	char *buf = bufs[i++ % ARRAY_SIZE(bufs)];

	if (r->failed == UNREADABLE)
		snprintf(buf, sizeof(bufs[0]), "unreadable");
	else if (r->failed && guest)
		snprintf(buf, sizeof(bufs[0]), "%s", ex_str(r->failed));
	else if (r->failed)
		snprintf(buf, sizeof(bufs[0]), "error");
	else
		snprintf(buf, sizeof(bufs[0]), "0x%lx", r->value);

	return buf;
}

static void check_msrs(const struct way *way, const struct vpmu *pmu, bool guest)
{
	struct msr_result want;
	enum msr_op op;
	int i;

	for (i = 0; i < nr_msrs; i++) {
		const struct msr *m = &msrs[i];
		const struct msr_access *a = guest ? &m->guest : &m->user;

		for (op = READ; op < NR_OPS; op++) {
			const struct msr_result *got = &a->results[op];

			if (guest && is_mediated && m->desc->maybe_native &&
			    exists(m, pmu) && op != WRITE_ZERO)
				continue;

			want = expect(m, pmu, op, guest);
			TEST_ASSERT(got->failed == want.failed &&
				    got->value == want.value,
				    "%s, %s: %s%d (MSR 0x%x), %s: wanted %s (then reads 0x%lx), got %s (0x%lx)",
				    way->name, guest ? "guest" : "userspace",
				    m->desc->name, m->idx, a->msr, op_names[op],
				    result_str(&want, guest), want.value,
				    result_str(got, guest), got->value);
		}
	}
}

/* Print what has happened, MSRs of the same kind and result in one line. */
static bool same_results(const struct msr_access *a, const struct msr_access *b)
{
	return !memcmp(a->results, b->results, sizeof(a->results));
}

static void print_msrs(const struct way *way)
{
	char name[48];
	int i, j, op;

	printf("%-12s %-25s %-43s | %s\n", way->name, "MSR",
	       way->no_apic ? "" : "guest: read, write 0, valid, reserved bits",
	       "userspace: the same");

	for (i = 0; i < nr_msrs; i = j) {
		for (j = i + 1; j < nr_msrs; j++) {
			if (msrs[j].desc != msrs[i].desc ||
			    !same_results(&msrs[i].guest, &msrs[j].guest) ||
			    !same_results(&msrs[i].user, &msrs[j].user))
				break;
		}

		if (msrs[i].desc->nr == 1 && !msrs[i].idx)
			snprintf(name, sizeof(name), "%s", msrs[i].desc->name);
		else if (j == i + 1)
			snprintf(name, sizeof(name), "%s%d", msrs[i].desc->name,
				 msrs[i].idx);
		else
			snprintf(name, sizeof(name), "%s%d-%d", msrs[i].desc->name,
				 msrs[i].idx, msrs[j - 1].idx);
		printf("%-12s %-25s", way->name, name);
		for (op = READ; op < NR_OPS; op++)
			printf(" %-10s", way->no_apic ? "" :
			       result_str(&msrs[i].guest.results[op], true));
		printf("|");
		for (op = READ; op < NR_OPS; op++)
			printf(" %-10s", result_str(&msrs[i].user.results[op], false));
		printf("\n");
	}
}

/* --- RDPMC --- */

static u32 gp_counter_msr(const struct vpmu *pmu, int idx)
{
	if (vendor == VMX)
		return MSR_IA32_PERFCTR0 + idx;

	return pmu->has_core ? MSR_F15H_PERF_CTR + 2 * idx :
			       MSR_K7_PERFCTR0 + idx;
}

static u32 gp_eventsel_msr(const struct vpmu *pmu, int idx)
{
	if (vendor == VMX)
		return MSR_P6_EVNTSEL0 + idx;

	return pmu->has_core ? MSR_F15H_PERF_CTL + 2 * idx :
			       MSR_K7_EVNTSEL0 + idx;
}

/* Returns the MSR of the counter, or zero if there's no such counter. */
static u32 pmc_msr(const struct vpmu *pmu, u32 idx)
{
	if (idx < pmu->nr_gp)
		return gp_counter_msr(pmu, idx);

	if (idx >= INTEL_RDPMC_FIXED && idx - INTEL_RDPMC_FIXED < pmu->nr_fixed)
		return MSR_CORE_PERF_FIXED_CTR0 + (idx - INTEL_RDPMC_FIXED);

	return 0;
}

static bool can_check_pmc(const struct vpmu *pmu, u32 idx)
{
	/* No PMU, no counters, and no exceptions from that. */
	if (!pmu->version)
		return true;

	/* Whether or not these exist depends on whether KVM intercepts RDPMC. */
	if (idx >= VMWARE_PMC_FIRST && idx <= VMWARE_PMC_LAST)
		return false;

	/* The CPU itself may have other kinds of counters. */
	return !is_mediated || pmc_msr(pmu, idx) || idx < 32;
}

static void test_rdpmc(struct kvm_vcpu *vcpu, const struct way *way,
		       const struct vpmu *pmu)
{
	const struct guest_run *run = get_guest_run(vcpu);
	struct kvm_sregs sregs;
	enum pmc_mode mode;
	u32 idx, msr;
	int i;

	for (i = 0; i < ARRAY_SIZE(pmc_indices); i++) {
		msr = pmc_msr(pmu, pmc_indices[i]);
		if (msr)
			vcpu_set_msr(vcpu, msr, COUNT + i);
	}

	vcpu_sregs_get(vcpu, &sregs);

	for (mode = CPL0; mode < NR_PMC_MODES; mode++) {
		bool is_user = mode == CPL3 || mode == CPL3_PCE;
		bool pce = mode == CPL0_PCE || mode == CPL3_PCE;
		int nr_read = 0;

		memset(get_guest_run(vcpu)->pmcs, 0xff, sizeof(run->pmcs));
		set_cpl(vcpu, &sregs, is_user ? 3 : 0, pce);
		run_guest(vcpu, guest_read_pmcs);

		for (i = 0; i < ARRAY_SIZE(pmc_indices); i++) {
			const struct pmc_read *got = &run->pmcs[i];
			u8 want;

			idx = pmc_indices[i];
			nr_read += !got->vector;
			if (!can_check_pmc(pmu, idx))
				continue;

			want = pmc_msr(pmu, idx) && (!is_user || pce) ? 0 : GP_VECTOR;
			TEST_ASSERT(got->vector == want,
				    "%s, RDPMC of 0x%x, %s: wanted %s, got %s",
				    way->name, idx, pmc_mode_names[mode],
				    want ? ex_str(want) : "no fault",
				    got->vector ? ex_str(got->vector) : "no fault");
			TEST_ASSERT(want || got->value == COUNT + i,
				    "%s, RDPMC of 0x%x, %s: wanted 0x%x, got 0x%lx",
				    way->name, idx, pmc_mode_names[mode],
				    COUNT + i, got->value);
		}

		if (verbose)
			printf("%-12s RDPMC, %s: %d of %zu indices can be read\n",
			       way->name, pmc_mode_names[mode], nr_read,
			       ARRAY_SIZE(pmc_indices));
	}

	set_cpl(vcpu, &sregs, 0, false);
}

/* --- emulated instructions --- */

static void add_write(struct guest_run *run, u32 msr, u64 value)
{
	TEST_ASSERT(run->nr_writes < ARRAY_SIZE(run->writes), "Too many MSRs");
	run->writes[run->nr_writes].msr = msr;
	run->writes[run->nr_writes++].value = value;
}

/* Set up the first counter, or try to set up all that one could think of. */
static void set_up_counters(struct guest_run *run, const struct vpmu *pmu)
{
	u64 eventsel = IDLE_EVENTSEL | ARCH_PERFMON_EVENTSEL_ENABLE;
	int i;

	run->nr_writes = 0;

	if (pmu->version) {
		add_write(run, gp_counter_msr(pmu, 0), PRESET);
		if (pmu->version >= 2)
			add_write(run, vendor == VMX ? MSR_CORE_PERF_GLOBAL_CTRL :
						       MSR_AMD64_PERF_CNTR_GLOBAL_CTL,
				  BIT_ULL(0));
		add_write(run, gp_eventsel_msr(pmu, 0), eventsel);
		return;
	}

	for (i = 0; i < nr_msrs; i++) {
		const struct msr_desc *d = msrs[i].desc;

		if (d->exists == has_ds || d->exists == has_pebs ||
		    d->exists == has_pebs_baseline)
			continue;

		if (d->base == MSR_CORE_PERF_FIXED_CTR_CTRL)
			add_write(run, d->base, 0xbbb);
		else if (d->valid == IDLE_EVENTSEL)
			add_write(run, msrs[i].guest.msr, eventsel);
		else if (d->valid == COUNT)
			add_write(run, msrs[i].guest.msr, PRESET);
		else
			add_write(run, msrs[i].guest.msr, ~0ull);
	}
}

static void test_emulation(struct kvm_vcpu *vcpu, const struct way *way,
			   const struct vpmu *pmu, bool denied,
			   const char *filter)
{
	struct guest_run *run = get_guest_run(vcpu);
	bool counts = pmu->version && !denied;
	u32 counter = pmu->version ? gp_counter_msr(pmu, 0) : 0;
	u64 total = 0;
	int i;

	set_up_counters(run, pmu);
	run->nr_nmis = -1ull;
	run_guest(vcpu, guest_emulate);

	for (i = 0; i < nr_msrs; i++) {
		u32 delta = run->after[i] - run->before[i];

		total += delta;

		if (counts && msrs[i].guest.msr == counter)
			TEST_ASSERT(delta >= NR_CPUIDS,
				    "%s, %s: wanted %d or more instructions counted, got %u",
				    way->name, filter, NR_CPUIDS, delta);
		if (counts)
			continue;

		TEST_ASSERT(!delta, "%s, %s: %s%d (MSR 0x%x) has moved by %u",
			    way->name, filter, msrs[i].desc->name, msrs[i].idx,
			    msrs[i].guest.msr, delta);
		TEST_ASSERT(pmu->version || !run->after[i] ||
			    exists(&msrs[i], pmu),
			    "%s, %s: %s%d (MSR 0x%x) wanted 0, got 0x%lx",
			    way->name, filter, msrs[i].desc->name, msrs[i].idx,
			    msrs[i].guest.msr, run->after[i]);
	}

	TEST_ASSERT(counts ? run->nr_nmis >= 1 : run->nr_nmis == 0,
		    "%s, %s: wanted %s, got %lu", way->name, filter,
		    counts ? "a PMI" : "no PMI", run->nr_nmis);

	if (verbose)
		printf("%-12s %d CPUIDs, %s: counters moved by %lu, %lu PMIs\n",
		       way->name, NR_CPUIDS, filter, total, run->nr_nmis);
}

static void set_event_filter(struct kvm_vm *vm, u32 action)
{
	struct {
		struct kvm_pmu_event_filter filter;
		u64 events[1];
	} f = {
		.filter.action = action,
		.filter.nevents = 1,
		.events[0] = INTEL_ARCH_INSTRUCTIONS_RETIRED,
	};

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, &f.filter);
}

/* --- all of it --- */

static void init_msrs(const struct vpmu *pmu)
{
	int i, j;

	nr_msrs = 0;

	for (i = 0; i < ARRAY_SIZE(msr_descs); i++) {
		const struct msr_desc *d = &msr_descs[i];
		u64 valid = d->get_valid ? d->get_valid(pmu) : d->valid;

		for (j = 0; j < d->nr; j++) {
			struct msr *m = &msrs[nr_msrs++];

			TEST_ASSERT(nr_msrs <= ARRAY_SIZE(msrs), "Too many MSRs");

			memset(m, 0, sizeof(*m));
			m->desc = d;
			m->idx = d->first + j;
			m->guest.msr = d->base + j * (d->stride ?: 1);
			m->guest.values[WRITE_ZERO] = 0;
			m->guest.values[WRITE_VALID] = valid;
			m->guest.values[WRITE_RESERVED] = valid | d->reserved;
			m->user = m->guest;
			m->is_listed = kvm_msr_is_in_save_restore_list(m->user.msr);
		}
	}
}

static void test_guest(const struct way *way, const struct vpmu *pmu)
{
	struct guest_run *run;
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	int i;

	vm = create_vm(way, &vcpu);
	set_way_cpuid(vcpu, way);
	vm_install_exception_handler(vm, NMI_VECTOR, guest_nmi_handler);
	prepare_cpl3(vm);

	run = get_guest_run(vcpu);
	run->nr_accesses = nr_msrs;
	for (i = 0; i < nr_msrs; i++)
		run->accesses[i] = msrs[i].guest;

	run_until_sync(vcpu);
	run_guest(vcpu, guest_access_msrs);
	for (i = 0; i < nr_msrs; i++)
		msrs[i].guest = run->accesses[i];

	if (verbose)
		print_msrs(way);
	check_msrs(way, pmu, true);

	test_rdpmc(vcpu, way, pmu);

	test_emulation(vcpu, way, pmu, false, "no event filter");
	if (kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER)) {
		set_event_filter(vm, KVM_PMU_EVENT_DENY);
		test_emulation(vcpu, way, pmu, true, "event denied");
		set_event_filter(vm, KVM_PMU_EVENT_ALLOW);
		test_emulation(vcpu, way, pmu, false, "event allowed");
	}

	kvm_vm_free(vm);
}

static void test_way(const struct way *way)
{
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	struct vpmu pmu;

	get_vpmu(way, &pmu);
	init_msrs(&pmu);

	printf("%s: PMU is %s (%s)\n", way->name, pmu.version ? "on" : "off",
	       way->help);

	vm = create_vm(way, &vcpu);
	set_way_cpuid(vcpu, way);
	user_access_msrs(vcpu);
	if (way->no_apic && verbose)
		print_msrs(way);

	/* The library's guest code can't handle faults without an APIC. */
	if (!way->no_apic)
		test_guest(way, &pmu);

	check_msrs(way, &pmu, false);

	/* MSR_KVM_ASYNC_PF_INT is listed, but can't be written without an APIC. */
	if (!way->no_apic)
		check_save_restore(vcpu, way);
	kvm_vm_free(vm);
}

static void assert_enable_cap(struct kvm_vm *vm, u64 arg, int want)
{
	int got = __vm_enable_cap(vm, KVM_CAP_PMU_CAPABILITY, arg) ? errno : 0;

	TEST_ASSERT(got == want,
		    "KVM_CAP_PMU_CAPABILITY, 0x%lx: wanted errno %d, got %d (%s)",
		    arg, want, got, strerror(got));
}

static void test_capability(void)
{
	struct kvm_enable_cap cap = {
		.cap = KVM_CAP_PMU_CAPABILITY,
		.args = { KVM_PMU_CAP_DISABLE },
	};
	bool has_pmu = kvm_is_pmu_enabled();
	int disabled_errno = has_pmu ? 0 : EINVAL;
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	int i;

	TEST_ASSERT_EQ(kvm_check_cap(KVM_CAP_PMU_CAPABILITY),
		       has_pmu ? KVM_PMU_CAP_DISABLE : 0);

	vm = vm_create(1);
	TEST_ASSERT_EQ(vm_check_cap(vm, KVM_CAP_PMU_CAPABILITY),
		       has_pmu ? KVM_PMU_CAP_DISABLE : 0);

	/* Unknown bits, alone and with the known one, change nothing. */
	for (i = 1; i < 64; i++) {
		assert_enable_cap(vm, BIT_ULL(i), EINVAL);
		assert_enable_cap(vm, BIT_ULL(i) | KVM_PMU_CAP_DISABLE, EINVAL);
	}

	/* There are no flags. */
	cap.flags = 1;
	TEST_ASSERT(__vm_ioctl(vm, KVM_ENABLE_CAP, &cap) == -1 && errno == EINVAL,
		    "KVM_CAP_PMU_CAPABILITY, flags 1: wanted EINVAL, got %s",
		    strerror(errno));
	cap.flags = 0;

	/* Once, twice, and it can be taken back; the last call counts. */
	assert_enable_cap(vm, KVM_PMU_CAP_DISABLE, disabled_errno);
	assert_enable_cap(vm, KVM_PMU_CAP_DISABLE, disabled_errno);
	TEST_ASSERT_EQ(vm_check_cap(vm, KVM_CAP_PMU_CAPABILITY),
		       has_pmu ? KVM_PMU_CAP_DISABLE : 0);
	assert_enable_cap(vm, 0, disabled_errno);

	/* But not once there is a vCPU, not even to what it is already. */
	vcpu = vm_vcpu_add(vm, 0, guest_code);
	assert_enable_cap(vm, KVM_PMU_CAP_DISABLE, EINVAL);
	assert_enable_cap(vm, 0, EINVAL);
	assert_enable_cap(vm, BIT_ULL(1), EINVAL);

	/* It's a capability of the VM, not of the vCPU. */
	TEST_ASSERT(__vcpu_ioctl(vcpu, KVM_ENABLE_CAP, &cap) == -1 && errno == EINVAL,
		    "KVM_CAP_PMU_CAPABILITY of a vCPU: wanted EINVAL, got %s",
		    strerror(errno));

	/* The counters are back, hence their MSRs hold what is written. */
	if (has_pmu) {
		u32 msr = vendor == VMX ? MSR_P6_EVNTSEL0 : MSR_K7_EVNTSEL0;

		vcpu_set_msr(vcpu, msr, IDLE_EVENTSEL);
		TEST_ASSERT_EQ(vcpu_get_msr(vcpu, msr), IDLE_EVENTSEL);
	}

	kvm_vm_free(vm);
}

/* What KVM supports is up to the module parameter, not to any VM. */
static void test_supported(void)
{
	const struct kvm_cpuid2 *cpuid = kvm_get_supported_cpuid();
	int i, r;

	if (kvm_is_pmu_enabled()) {
		if (vendor == VMX) {
			TEST_ASSERT(kvm_cpu_property(X86_PROPERTY_PMU_VERSION) &&
				    kvm_cpu_property(X86_PROPERTY_PMU_NR_GP_COUNTERS),
				    "KVM has a PMU, but CPUID.0xA has none");
		} else if (has_perfmon_v2()) {
			TEST_ASSERT(kvm_cpu_has(X86_FEATURE_PERFCTR_CORE),
				    "PERFMON_V2 is supported, but not PERFCTR_CORE");
			r = kvm_cpu_property(X86_PROPERTY_NR_PERFCTR_CORE);
			TEST_ASSERT(r >= AMD64_NR_COUNTERS,
				    "PERFMON_V2 has too few counters: %d", r);
		}
		return;
	}

	for (i = 0; i < cpuid->nent; i++) {
		const struct kvm_cpuid_entry2 *e = &cpuid->entries[i];

		if (e->function != 0xa && e->function != 0x80000022)
			continue;

		TEST_ASSERT(!e->eax && !e->ebx && !e->ecx && !e->edx,
			    "KVM has no PMU, but CPUID.0x%x is 0x%x, 0x%x, 0x%x, 0x%x",
			    e->function, e->eax, e->ebx, e->ecx, e->edx);
	}
	TEST_ASSERT(!kvm_cpu_has(X86_FEATURE_PERFCTR_CORE) &&
		    !kvm_cpu_has(X86_FEATURE_PDCM),
		    "KVM has no PMU, but CPUID has PERFCTR_CORE or PDCM");

	if (kvm_has_cap(KVM_CAP_GET_MSR_FEATURES)) {
		u64 perf_caps = kvm_get_feature_msr(MSR_IA32_PERF_CAPABILITIES);

		TEST_ASSERT(!perf_caps, "KVM has no PMU, but supports 0x%lx in PERF_CAPABILITIES",
			    perf_caps);
	}

	for (i = 0; i < ARRAY_SIZE(msr_descs); i++) {
		if (msr_descs[i].exists == has_perf_caps)
			continue;

		for (r = 0; r < msr_descs[i].nr; r++) {
			u32 msr = msr_descs[i].base + r * (msr_descs[i].stride ?: 1);

			TEST_ASSERT(!kvm_msr_is_in_save_restore_list(msr),
				    "KVM has no PMU, but lists MSR 0x%x", msr);
		}
	}
}

static void print_usage(FILE *out, const char *name)
{
	int i;

	fprintf(out, "usage: %s [-w WAY] [-v] [-h]\n"
		" -w: test only this way to configure a PMU (default: all)\n"
		" -v: print what guest and userspace get for each way and MSR\n"
		" -h: print this help\n"
		"ways:\n", name);
	for (i = 0; i < ARRAY_SIZE(ways); i++)
		fprintf(out, "  %-14s%s\n", ways[i].name, ways[i].help);
}

int main(int argc, char *argv[])
{
	const char *only = NULL;
	int opt, i, nr = 0;

	while ((opt = getopt(argc, argv, "w:vh")) != -1) {
		switch (opt) {
		case 'w':
			only = optarg;
			break;
		case 'v':
			verbose = true;
			break;
		case 'h':
			print_usage(stdout, argv[0]);
			exit(KSFT_PASS);
		default:
			print_usage(stderr, argv[0]);
			exit(KSFT_FAIL);
		}
	}

	TEST_REQUIRE(host_cpu_is_intel || host_cpu_is_amd_compatible);
	TEST_REQUIRE(!get_kvm_param_bool("ignore_msrs"));

	vendor = host_cpu_is_intel ? VMX : SVM;
	is_mediated = kvm_is_pmu_enabled() && kvm_is_mediated_pmu_enabled();

	printf("KVM's PMU is %s\n", !kvm_is_pmu_enabled() ? "off for all VMs" :
	       is_mediated ? "mediated" : "based on perf");

	test_supported();
	test_capability();

	for (i = 0; i < ARRAY_SIZE(ways); i++) {
		if (only && strcmp(only, ways[i].name))
			continue;
		if (!way_is_possible(&ways[i])) {
			printf("%s: skipped, not possible here\n", ways[i].name);
			continue;
		}
		test_way(&ways[i]);
		nr++;
	}

	__TEST_REQUIRE(nr, "nothing to test");

	return KSFT_PASS;
}
