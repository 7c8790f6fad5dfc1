// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test the virtual PMU against a model, with random sequences of operations
 *
 * The guest executes a script of random operations: it writes and reads PMU
 * MSRs, reads counters with RDPMC, and executes instructions and branches that
 * KVM emulates.  In between, userspace changes the event filter, moves the vCPU
 * to a new VM, and sets up another vCPU with another version of the PMU.  All
 * that the guest reads, and the number of PMIs that it got, has to be what a
 * model of the PMU says.
 *
 * The model knows only rules of the manuals, and one choice of KVM: WRMSR
 * retires after the write took effect, i.e. it is counted if the counter is
 * enabled afterwards.
 *
 * If the CPU counts the instructions that KVM doesn't emulate, the value of a
 * counter that is, or was, enabled isn't known, just that it didn't miss what
 * was emulated, and nothing is known about its overflows.  What is exact then
 * is everything else: counters that are disabled in any way, once they were
 * read, selectors, controls, and what is saved and restored.
 */
#include <getopt.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

/* The PIC's edge/level control register, written with what's in it. */
#define PIO_KERNEL_PORT		0x4d0

#define APIC_LVTPC		0x340
#define MSR_X2APIC_LVTPC	(APIC_BASE_MSR + (APIC_LVTPC >> 4))

/* Operations per exit to userspace, and on average per VM. */
#define BATCH_SIZE		512
#define NR_BATCHES_PER_VM	64

#define MAX_NR_GP		4
#define NR_COUNTERS		(MAX_NR_GP + 1)
#define FIXED			MAX_NR_GP

/* All AMD CPUs, and Intel CPUs of the last decade. */
#define COUNTER_MASK		(BIT_ULL(48) - 1)

enum op_type {
	OP_CPUID,
	OP_IN,
	OP_OUT,
	OP_FEP_ADD,
	OP_FEP_JMP,
	OP_FEP_JCC,
	OP_RDPMC,
	OP_RDMSR,
	OP_WRMSR,
	NR_OP_TYPES,
};

static const char * const op_names[] = {
	"CPUID", "IN", "OUT", "forced ADD", "forced JMP", "forced Jcc", "RDPMC", "RDMSR", "WRMSR",
};

struct op {
	u32 type;
	u32 index;
	u64 value;

	/* What the guest read, and PMIs so far. */
	u64 result;
	u64 nr_pmis;
};

/* The guest's script. */
static struct op script[BATCH_SIZE];
static u64 script_len;

static u64 guest_nr_pmis;

/* Nothing in here may be emulated, or it would have to be in the model. */
static void guest_nmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_pmis, guest_nr_pmis + 1);
}

static void guest_execute(struct op *op)
{
	u32 eax = 0, ebx, ecx = op->index, edx = 0;

	switch (op->type) {
	case OP_CPUID:
		__cpuid(0, 0, &eax, &ebx, &ecx, &edx);
		break;
	case OP_IN:
		asm volatile("in %%dx, %%al" : "=a"(eax) : "d"(PIO_KERNEL_PORT));
		break;
	case OP_OUT:
		asm volatile("out %%al, %%dx" : : "a"(0), "d"(PIO_KERNEL_PORT));
		break;
	case OP_FEP_ADD:
		asm volatile(KVM_FEP "add %%eax, %%edx" : "+d"(edx) : "a"(eax) : "cc");
		break;
	case OP_FEP_JMP:
		asm volatile(KVM_FEP "jmp 1f; 1:");
		break;
	case OP_FEP_JCC:
		asm volatile("cmp %0, %1;" KVM_FEP "je 1f; 1:" : : "r"(eax), "r"(ecx) : "cc");
		break;
	case OP_RDPMC:
		asm volatile("rdpmc" : "=a"(eax), "=d"(edx) : "c"(ecx));
		op->result = eax | (u64)edx << 32;
		break;
	case OP_RDMSR:
		op->result = rdmsr(op->index);
		break;
	case OP_WRMSR:
		wrmsr(op->index, op->value);
		break;
	default:
		break;
	}
}

static void guest_code(void)
{
	u64 i;

	x2apic_enable();
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

	for (;;) {
		GUEST_SYNC(0);

		for (i = 0; i < READ_ONCE(script_len); i++) {
			guest_execute(&script[i]);
			script[i].nr_pmis = READ_ONCE(guest_nr_pmis);
		}
	}
}

/*
 * The model.
 */

struct counter {
	u64 value;
	u64 eventsel;

	/* The CPU may have counted since the counter was last read. */
	bool unknown;
};

struct model {
	bool intel;
	bool has_global_ctrl;
	int nr_gp, nr_fixed;

	struct counter counters[NR_COUNTERS];
	u64 fixed_ctrl;
	u64 global_ctrl, global_status;

	/* Status bits of counters that the CPU may have overflowed. */
	u64 unknown_status;

	u64 lvtpc;
	u64 nr_pmis;

	/* The event filter. */
	u32 action;
	bool match_instructions, match_branches, match_fixed;
};

static bool counts_native;

static u64 instructions_event(struct model *m)
{
	return m->intel ? INTEL_ARCH_INSTRUCTIONS_RETIRED : AMD_ZEN_INSTRUCTIONS_RETIRED;
}

static u64 branches_event(struct model *m)
{
	return m->intel ? INTEL_ARCH_BRANCHES_RETIRED : AMD_ZEN_BRANCHES_RETIRED;
}

static u64 status_bit(int i)
{
	return i == FIXED ? FIXED_PMC_GLOBAL_CTRL_ENABLE(0) : BIT_ULL(i);
}

static bool is_enabled(struct model *m, int i)
{
	if (m->has_global_ctrl && !(m->global_ctrl & status_bit(i)))
		return false;

	/* The guest runs at CPL 0. */
	if (i == FIXED)
		return m->fixed_ctrl & FIXED_PMC_CTRL(0, FIXED_PMC_KERNEL);

	return (m->counters[i].eventsel & ARCH_PERFMON_EVENTSEL_ENABLE) &&
	       (m->counters[i].eventsel & ARCH_PERFMON_EVENTSEL_OS);
}

static bool is_allowed(struct model *m, int i)
{
	u64 event = m->counters[i].eventsel & 0xffff;
	bool match;

	if (i == FIXED)
		match = m->match_fixed;
	else
		match = (m->match_instructions && event == instructions_event(m)) ||
			(m->match_branches && event == branches_event(m));

	return match == (m->action == KVM_PMU_EVENT_ALLOW);
}

static bool wants_pmi(struct model *m, int i)
{
	if (i == FIXED)
		return m->fixed_ctrl & FIXED_PMC_CTRL(0, FIXED_PMC_ENABLE_PMI);

	return m->counters[i].eventsel & ARCH_PERFMON_EVENTSEL_INT;
}

static bool counts(struct model *m, int i, bool branch)
{
	u64 event = m->counters[i].eventsel & 0xffff;

	if (i == FIXED ? !m->nr_fixed : i >= m->nr_gp)
		return false;

	return is_enabled(m, i) && is_allowed(m, i) &&
	       (i == FIXED || event == instructions_event(m) ||
		(branch && event == branches_event(m)));
}

/* The CPU, if it counts, counts whatever it executes with these settings. */
static void mark_unknown(struct model *m)
{
	int i;

	for (i = 0; counts_native && i < NR_COUNTERS; i++) {
		if (is_enabled(m, i) && is_allowed(m, i)) {
			m->counters[i].unknown = true;
			m->unknown_status |= status_bit(i);
		}
	}
}

static void retire(struct model *m, bool branch)
{
	bool pmi = false;
	int i;

	for (i = 0; i < NR_COUNTERS; i++) {
		if (!counts(m, i, branch))
			continue;

		m->counters[i].value = (m->counters[i].value + 1) & COUNTER_MASK;
		if (m->counters[i].value)
			continue;

		m->global_status |= status_bit(i);
		pmi |= wants_pmi(m, i);
	}

	if (pmi && !(m->lvtpc & APIC_LVT_MASKED)) {
		m->nr_pmis++;

		/* AMD CPUs don't mask it. */
		if (m->intel)
			m->lvtpc |= APIC_LVT_MASKED;
	}
}

static u32 eventsel_msr(struct model *m, int i)
{
	return (m->intel ? MSR_P6_EVNTSEL0 : MSR_K7_EVNTSEL0) + i;
}

static u32 counter_msr(struct model *m, int i)
{
	if (i == FIXED)
		return MSR_CORE_PERF_FIXED_CTR0;

	return (m->intel ? MSR_IA32_PERFCTR0 : MSR_K7_PERFCTR0) + i;
}

static u32 global_ctrl_msr(struct model *m)
{
	return m->intel ? MSR_CORE_PERF_GLOBAL_CTRL : MSR_AMD64_PERF_CNTR_GLOBAL_CTL;
}

static u32 global_status_msr(struct model *m)
{
	return m->intel ? MSR_CORE_PERF_GLOBAL_STATUS : MSR_AMD64_PERF_CNTR_GLOBAL_STATUS;
}

static u32 global_clear_msr(struct model *m)
{
	return m->intel ? MSR_CORE_PERF_GLOBAL_OVF_CTRL : MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR;
}

static struct counter *msr_to_counter(struct model *m, u32 msr)
{
	int i;

	for (i = 0; i < NR_COUNTERS; i++) {
		if (msr == counter_msr(m, i))
			return &m->counters[i];
	}

	return NULL;
}

static void write_msr(struct model *m, u32 msr, u64 value)
{
	struct counter *counter = msr_to_counter(m, msr);

	if (counter) {
		/* On Intel, the upper half is the sign of the lower half. */
		if (m->intel && counter != &m->counters[FIXED])
			value = (s32)value;
		counter->value = value & COUNTER_MASK;
		counter->unknown = false;
	} else if (msr == MSR_X2APIC_LVTPC) {
		m->lvtpc = value;
	} else if (msr == MSR_CORE_PERF_FIXED_CTR_CTRL) {
		m->fixed_ctrl = value;
	} else if (msr == global_ctrl_msr(m)) {
		m->global_ctrl = value;
	} else if (msr == global_clear_msr(m)) {
		m->global_status &= ~value;
		m->unknown_status &= ~value;
	} else {
		m->counters[msr - eventsel_msr(m, 0)].eventsel = value;
	}
}

static u64 read_msr(struct model *m, u32 msr)
{
	struct counter *counter = msr_to_counter(m, msr);

	if (counter)
		return counter->value;
	if (msr == MSR_X2APIC_LVTPC)
		return m->lvtpc;
	if (msr == MSR_CORE_PERF_FIXED_CTR_CTRL)
		return m->fixed_ctrl;
	if (msr == global_ctrl_msr(m))
		return m->global_ctrl;
	if (msr == global_status_msr(m))
		return m->global_status;

	return m->counters[msr - eventsel_msr(m, 0)].eventsel;
}

/*
 * What is compared, and how it's generated.
 */

struct test {
	struct kvm_vm *vm;
	struct kvm_vcpu *vcpu;
	struct op *script;
	u64 *script_len;

	struct model model;
	struct kvm_random_state rng;
	u32 seed;
	u64 step, nr_vms, nr_restores, nr_filters;
};

static u32 random_below(struct test *t, u32 limit)
{
	return kvm_random_u32(&t->rng) % limit;
}

static bool one_in(struct test *t, u32 n)
{
	return !random_below(t, n);
}

static int random_counter(struct test *t)
{
	int i = random_below(t, t->model.nr_gp + t->model.nr_fixed);

	return i < t->model.nr_gp ? i : FIXED;
}

static u64 random_count(struct test *t)
{
	switch (random_below(t, 4)) {
	case 0:
		return -1ull - random_below(t, 3);
	case 1:
		return -1ull - random_below(t, 100);
	case 2:
		return random_below(t, 100);
	default:
		return kvm_random_u64(&t->rng);
	}
}

static u64 random_eventsel(struct test *t)
{
	const u64 flags = ARCH_PERFMON_EVENTSEL_USR | ARCH_PERFMON_EVENTSEL_OS |
			  ARCH_PERFMON_EVENTSEL_INT | ARCH_PERFMON_EVENTSEL_ENABLE;
	const u64 events[] = {
		instructions_event(&t->model),
		instructions_event(&t->model),
		branches_event(&t->model),
		/* Another unit mask, and cycles: nothing that KVM emulates. */
		branches_event(&t->model) | BIT(9),
		t->model.intel ? 0x3c : 0x76,
	};
	u64 eventsel = events[random_below(t, ARRAY_SIZE(events))];

	if (one_in(t, 3))
		return eventsel | (kvm_random_u32(&t->rng) & flags);

	return eventsel | ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_ENABLE |
	       (kvm_random_u32(&t->rng) & ARCH_PERFMON_EVENTSEL_INT);
}

static u64 all_status_bits(struct model *m)
{
	return (BIT_ULL(m->nr_gp) - 1) | (m->nr_fixed ? status_bit(FIXED) : 0);
}

static void generate_msr_access(struct test *t, struct op *op)
{
	struct model *m = &t->model;
	int i = random_counter(t);

	op->type = one_in(t, 2) ? OP_RDMSR : OP_WRMSR;

	switch (random_below(t, m->has_global_ctrl ? 8 : 5)) {
	case 0 ... 1:
		op->index = counter_msr(m, i);
		op->value = random_count(t);
		/* What's ignored on some CPUs and counters faults on others. */
		if (!m->intel || i == FIXED)
			op->value &= COUNTER_MASK;
		break;
	case 2 ... 3:
		if (i == FIXED) {
			op->index = MSR_CORE_PERF_FIXED_CTR_CTRL;
			op->value = FIXED_PMC_CTRL(0, random_below(t, 4) |
						      (one_in(t, 2) ? FIXED_PMC_ENABLE_PMI : 0));
		} else {
			op->index = eventsel_msr(m, i);
			op->value = random_eventsel(t);
		}
		break;
	case 4:
		op->index = MSR_X2APIC_LVTPC;
		op->value = APIC_DM_NMI | (one_in(t, 8) ? APIC_LVT_MASKED : 0);
		break;
	case 5:
		op->index = global_ctrl_msr(m);
		op->value = all_status_bits(m);
		if (one_in(t, 2))
			op->value &= kvm_random_u64(&t->rng);
		break;
	case 6:
		op->type = OP_RDMSR;
		op->index = global_status_msr(m);
		break;
	default:
		op->type = OP_WRMSR;
		op->index = global_clear_msr(m);
		op->value = all_status_bits(m) & kvm_random_u64(&t->rng);
		break;
	}
}

static void generate(struct test *t, struct op *op)
{
	int i;

	*op = (struct op) {};

	switch (random_below(t, 8)) {
	case 0 ... 2:
		generate_msr_access(t, op);
		break;
	case 3:
		i = random_counter(t);
		op->type = OP_RDPMC;
		op->index = i == FIXED ? INTEL_RDPMC_FIXED : i;
		break;
	default:
		op->type = random_below(t, is_forced_emulation_enabled ? OP_RDPMC : OP_FEP_ADD);
		break;
	}
}

static void check_read(struct test *t, const struct op *op, u32 index, u64 wanted)
{
	struct counter *counter = msr_to_counter(&t->model, index);
	u64 ignored = 0;

	if (index == global_status_msr(&t->model))
		ignored = t->model.unknown_status;
	else if (index == MSR_X2APIC_LVTPC && counts_native)
		ignored = APIC_LVT_MASKED;

	/* Learn what the CPU counted, it may have been anything but too few. */
	if (counter && counter->unknown && ((op->result - wanted) & COUNTER_MASK) < BIT_ULL(40)) {
		counter->value = op->result;
		counter->unknown = false;
		return;
	}

	TEST_ASSERT(!((op->result ^ wanted) & ~ignored),
		    "Seed 0x%x, step %lu: %s(0x%x), wanted 0x%lx, got 0x%lx",
		    t->seed, t->step, op_names[op->type], op->index, wanted, op->result);
}

/* Do with the model what the guest did, and compare. */
static void check(struct test *t, const struct op *op)
{
	struct model *m = &t->model;
	u32 msr = op->index;

	if (op->type == OP_RDPMC)
		msr = counter_msr(m, op->index == INTEL_RDPMC_FIXED ? FIXED : op->index);

	mark_unknown(m);
	if (op->type == OP_RDPMC || op->type == OP_RDMSR)
		check_read(t, op, msr, read_msr(m, msr));
	if (op->type == OP_WRMSR)
		write_msr(m, msr, op->value);

	retire(m, op->type == OP_FEP_JMP || op->type == OP_FEP_JCC);
	mark_unknown(m);

	/* Whether LVTPC is masked depends on the number, too. */
	if (counts_native) {
		m->nr_pmis = op->nr_pmis;
		return;
	}

	TEST_ASSERT(op->nr_pmis == m->nr_pmis,
		    "Seed 0x%x, step %lu: %s(0x%x, 0x%lx), wanted %lu PMIs, got %lu",
		    t->seed, t->step, op_names[op->type], op->index, op->value,
		    m->nr_pmis, op->nr_pmis);
}

static void run_until_sync(struct test *t)
{
	struct ucall uc;

	vcpu_run(t->vcpu);

	switch (get_ucall(t->vcpu, &uc)) {
	case UCALL_SYNC:
		return;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("Seed 0x%x, step %lu: unexpected exit reason %u (%s)", t->seed, t->step,
			  t->vcpu->run->exit_reason, exit_reason_str(t->vcpu->run->exit_reason));
	}
}

static void run_batch(struct test *t, u64 nr)
{
	u64 i;

	for (i = 0; i < nr; i++)
		generate(t, &t->script[i]);
	*t->script_len = nr;

	run_until_sync(t);

	for (i = 0; i < nr; i++, t->step++)
		check(t, &t->script[i]);

	/* The IN of GUEST_SYNC(), which get_ucall() completes. */
	retire(&t->model, false);
}

static void set_filter(struct test *t)
{
	struct model *m = &t->model;
	struct kvm_pmu_event_filter *f;

	m->action = one_in(t, 2) ? KVM_PMU_EVENT_ALLOW : KVM_PMU_EVENT_DENY;
	m->match_instructions = one_in(t, 2) == (m->action == KVM_PMU_EVENT_DENY);
	m->match_branches = one_in(t, 2);
	m->match_fixed = one_in(t, 2);

	f = calloc(1, sizeof(*f) + 2 * sizeof(f->events[0]));
	TEST_ASSERT(f, "Failed to allocate memory for the event filter");

	f->action = m->action;
	f->fixed_counter_bitmap = m->match_fixed;
	if (m->match_instructions)
		f->events[f->nevents++] = instructions_event(m);
	if (m->match_branches)
		f->events[f->nevents++] = branches_event(m);

	vm_ioctl(t->vm, KVM_SET_PMU_EVENT_FILTER, f);
	free(f);

	t->nr_filters++;
	mark_unknown(m);
}

/* Move the vCPU to a new VM, which doesn't inherit the filter. */
static void save_and_restore(struct test *t)
{
	struct kvm_x86_state *state;
	struct kvm_lapic_state apic;
	struct kvm_cpuid2 *cpuid;

	/* The version of the PMU, which may not be what the library sets up. */
	cpuid = allocate_kvm_cpuid2(t->vcpu->cpuid->nent);
	memcpy(cpuid, t->vcpu->cpuid, kvm_cpuid2_size(t->vcpu->cpuid->nent));

	vcpu_ioctl(t->vcpu, KVM_GET_LAPIC, &apic);
	state = vcpu_save_state(t->vcpu);
	kvm_vm_release(t->vm);

	t->vcpu = vm_recreate_with_one_vcpu(t->vm);
	vcpu_init_cpuid(t->vcpu, cpuid);
	free(cpuid);
	vcpu_load_state(t->vcpu, state);
	vcpu_ioctl(t->vcpu, KVM_SET_LAPIC, &apic);
	kvm_x86_state_cleanup(state);

	t->model.action = KVM_PMU_EVENT_DENY;
	t->model.match_instructions = false;
	t->model.match_branches = false;
	t->model.match_fixed = false;
	t->nr_restores++;
	mark_unknown(&t->model);
}

static bool is_version_2_supported(void)
{
	return host_cpu_is_intel ? kvm_cpu_property(X86_PROPERTY_PMU_VERSION) >= 2 :
				   kvm_cpu_has(X86_FEATURE_PERFMON_V2);
}

static void create_vm(struct test *t, bool version_1)
{
	struct model *m = &t->model;

	*m = (struct model) {
		.intel = host_cpu_is_intel,
		.has_global_ctrl = !version_1,
		.nr_gp = 4,
		.lvtpc = APIC_DM_NMI,
		.action = KVM_PMU_EVENT_DENY,
	};
	if (m->intel) {
		m->nr_gp = min_t(int, kvm_cpu_property(X86_PROPERTY_PMU_NR_GP_COUNTERS), 4);
		m->nr_fixed = !version_1 && kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED_FIXED);
	}

	t->vm = vm_create_with_one_vcpu(&t->vcpu, guest_code);
	vm_install_exception_handler(t->vm, NMI_VECTOR, guest_nmi_handler);
	if (version_1 && m->intel)
		vcpu_set_cpuid_property(t->vcpu, X86_PROPERTY_PMU_VERSION, 1);
	else if (version_1 && kvm_cpu_has(X86_FEATURE_PERFMON_V2))
		vcpu_clear_cpuid_feature(t->vcpu, X86_FEATURE_PERFMON_V2);

	/* All general purpose counters are enabled globally at RESET. */
	if (m->has_global_ctrl)
		m->global_ctrl = vcpu_get_msr(t->vcpu, global_ctrl_msr(m));

	t->script = addr_gva2hva(t->vm, (gva_t)script);
	t->script_len = addr_gva2hva(t->vm, (gva_t)&script_len);
	run_until_sync(t);

	t->nr_vms++;
}

/* Find out whether the CPU counts instructions that aren't emulated. */
static void detect_native_counts(struct test *t)
{
	struct model *m = &t->model;

	create_vm(t, true);

	t->script[0] = (struct op) {
		.type = OP_WRMSR, .index = eventsel_msr(m, 0),
		.value = instructions_event(m) | ARCH_PERFMON_EVENTSEL_OS |
			 ARCH_PERFMON_EVENTSEL_ENABLE,
	};
	t->script[1] = (struct op) { .type = OP_RDPMC };
	t->script[2] = (struct op) { .type = OP_RDPMC };
	*t->script_len = 3;
	run_until_sync(t);
	counts_native = t->script[2].result - t->script[1].result != 1;

	kvm_vm_free(t->vm);
}

static void print_usage(const char *name)
{
	printf("usage: %s [-h] [-s SEED] [-n STEPS]\n\n"
	       " -h  print this help\n"
	       " -s  seed of the random numbers (random)\n"
	       " -n  number of operations of the guest (100000)\n", name);
}

int main(int argc, char *argv[])
{
	struct test t = { .seed = kvm_random_seed };
	u64 nr_steps = 100000;
	bool has_filter;
	int opt;

	while ((opt = getopt(argc, argv, "hs:n:")) != -1) {
		switch (opt) {
		case 's':
			t.seed = strtoul(optarg, NULL, 0);
			break;
		case 'n':
			nr_steps = strtoul(optarg, NULL, 0);
			break;
		default:
			print_usage(argv[0]);
			exit(opt == 'h' ? 0 : 1);
		}
	}

	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(host_cpu_is_intel || host_cpu_is_amd_compatible);
	if (host_cpu_is_intel) {
		TEST_REQUIRE(kvm_pmu_has(X86_PMU_FEATURE_INSNS_RETIRED));
		TEST_REQUIRE(kvm_pmu_has(X86_PMU_FEATURE_BRANCH_INSNS_RETIRED));
		TEST_REQUIRE(kvm_cpu_property(X86_PROPERTY_PMU_GP_COUNTERS_BIT_WIDTH) == 48);
	}
	has_filter = kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER);

	t.rng = new_kvm_random_state(t.seed);
	detect_native_counts(&t);

	while (t.step < nr_steps) {
		bool version_1 = !is_version_2_supported() || one_in(&t, 4);
		u64 i, nr, nr_batches = 1 + random_below(&t, 2 * NR_BATCHES_PER_VM);

		create_vm(&t, version_1);

		for (i = 0; i < nr_batches && t.step < nr_steps; i++) {
			nr = 1 + random_below(&t, BATCH_SIZE);
			run_batch(&t, min(nr_steps - t.step, nr));

			if (has_filter && one_in(&t, 4))
				set_filter(&t);
			if (one_in(&t, 32))
				save_and_restore(&t);
		}

		kvm_vm_free(t.vm);
	}

	pr_info("Seed 0x%x: %lu steps, %lu VMs, %lu moves, %lu filters, %s by the CPU\n",
		t.seed, t.step, t.nr_vms, t.nr_restores, t.nr_filters,
		counts_native ? "also counted" : "none counted");

	return 0;
}
