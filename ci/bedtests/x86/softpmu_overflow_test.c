// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a counter overflows once, and at the right event
 *
 * Let random numbers of events happen, some emulated by KVM, the others counted
 * by the (software) host PMU, and compare the guest's counter, its overflow status
 * where there is one, and its PMIs with a model, event by event.  The guest works
 * off scripts that the host writes along with what has to come out of them.
 *
 * Also test what userspace sees if it saves the state of a vCPU with an overflow
 * that KVM hasn't delivered yet.  With -s, do neither, and print what KVM makes
 * perf do for a guest that samples, with and without emulated events.
 *
 * Natively counted events come from softpmu, i.e. the test is for the test beds
 * only.
 */
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

#define APIC_LVTPC		0x340

#define SOFTPMU_ADVANCE		"/sys/kernel/debug/softpmu/advance"
#define SOFTPMU_STATS		"/sys/kernel/debug/softpmu/stats"
#define SOFTPMU_EXACT		"/sys/module/softpmu/parameters/exact"

/* All counters are 48 bits wide on the test beds. */
#define COUNTER_MASK		(BIT_ULL(48) - 1)

#define DEFAULT_NR_OVERFLOWS	5000

#define MAX_OPS			1024
#define MAX_PMIS		256

struct counter {
	const char *name;
	u32 ctrl_msr;
	u32 counter_msr;
	u32 global_ctrl_msr, global_status_msr, global_clear_msr;
	u64 global_ctrl;
	u64 ctrl;
	u64 event;
};

#define GP_CTRL		(ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_USR |	\
			 ARCH_PERFMON_EVENTSEL_INT | ARCH_PERFMON_EVENTSEL_ENABLE)

#define INTEL_GLOBAL						\
	.global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL,		\
	.global_status_msr = MSR_CORE_PERF_GLOBAL_STATUS,	\
	.global_clear_msr = MSR_CORE_PERF_GLOBAL_OVF_CTRL

static const struct counter amd_counters[] = {
	{
		.name = "counter 0",
		.ctrl_msr = MSR_K7_EVNTSEL0,
		.counter_msr = MSR_K7_PERFCTR0,
		.ctrl = GP_CTRL | AMD_ZEN_INSTRUCTIONS_RETIRED,
		.event = AMD_ZEN_INSTRUCTIONS_RETIRED,
	},
};

static const struct counter intel_counters[] = {
	{
		.name = "general purpose counter 0",
		.ctrl_msr = MSR_P6_EVNTSEL0,
		.counter_msr = MSR_IA32_PMC0,
		INTEL_GLOBAL,
		.global_ctrl = BIT_ULL(0),
		.ctrl = GP_CTRL | INTEL_ARCH_INSTRUCTIONS_RETIRED,
		.event = INTEL_ARCH_INSTRUCTIONS_RETIRED,
	},
	{
		.name = "fixed counter 0",
		.ctrl_msr = MSR_CORE_PERF_FIXED_CTR_CTRL,
		.counter_msr = MSR_CORE_PERF_FIXED_CTR0,
		INTEL_GLOBAL,
		.global_ctrl = FIXED_PMC_GLOBAL_CTRL_ENABLE(0),
		.ctrl = FIXED_PMC_CTRL(0, FIXED_PMC_KERNEL | FIXED_PMC_USER |
					  FIXED_PMC_ENABLE_PMI),
		.event = INTEL_ARCH_INSTRUCTIONS_RETIRED,
	},
};

enum op_type {
	OP_END,		/* Exit to userspace for the next script. */
	OP_NATIVE,	/* Exit to userspace, have @arg events happen there. */
	OP_EMULATE,	/* Execute CPUID @arg times. */
	OP_ARM,		/* Write LVTPC, Intel CPUs mask it when it delivers a PMI. */
	OP_WRITE,	/* Write @arg to the counter. */
	OP_STOP,	/* Disable the counter by its own control. */
	OP_START,
	OP_GLOBAL_STOP,	/* Disable the counter in GLOBAL_CTRL. */
	OP_GLOBAL_START,
	OP_READ,	/* Read the counter. */
	OP_STATUS,	/* Read GLOBAL_STATUS. */
	OP_CLEAR,	/* Clear GLOBAL_STATUS. */
};

static const char * const op_names[] = {
	"end", "native", "emulate", "arm", "write", "stop", "start",
	"global stop", "global start", "read", "status", "clear",
};

struct op {
	u64 type;
	u64 arg;
};

struct pmi {
	u64 op;
	u64 iteration;
};

/* A script, and what has come out of it (guest), or is to come out (host). */
struct outcome {
	u64 values[MAX_OPS];
	struct pmi pmis[MAX_PMIS];
	u64 nr_pmis;
};

static struct guest {
	struct counter counter;
	struct op ops[MAX_OPS];
	struct outcome outcome;
	u64 op, iteration;
} guest;

static struct guest *shared;
static struct op *ops;
static struct outcome wanted;

static void guest_nmi_handler(struct ex_regs *regs)
{
	struct outcome *out = &guest.outcome;

	if (out->nr_pmis < MAX_PMIS) {
		out->pmis[out->nr_pmis].op = READ_ONCE(guest.op);
		out->pmis[out->nr_pmis].iteration = READ_ONCE(guest.iteration);
	}
	out->nr_pmis++;
}

static void guest_do_op(const struct counter *c, const struct op *op, u64 *value)
{
	u64 i;

	switch (op->type) {
	case OP_NATIVE:
		GUEST_SYNC(op->arg);
		break;
	case OP_EMULATE:
		for (i = 0; i < op->arg; i++) {
			u32 eax = 0, ecx = 0;

			WRITE_ONCE(guest.iteration, i);
			asm volatile("cpuid" : "+a" (eax), "+c" (ecx) :: "ebx", "edx", "memory");
		}
		break;
	case OP_ARM:
		x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);
		break;
	case OP_WRITE:
		wrmsr(c->counter_msr, op->arg);
		break;
	case OP_STOP:
		wrmsr(c->ctrl_msr, 0);
		break;
	case OP_START:
		wrmsr(c->ctrl_msr, c->ctrl);
		break;
	case OP_GLOBAL_STOP:
		wrmsr(c->global_ctrl_msr, 0);
		break;
	case OP_GLOBAL_START:
		wrmsr(c->global_ctrl_msr, c->global_ctrl);
		break;
	case OP_READ:
		*value = rdmsr(c->counter_msr);
		break;
	case OP_STATUS:
		*value = rdmsr(c->global_status_msr);
		break;
	case OP_CLEAR:
		wrmsr(c->global_clear_msr, c->global_ctrl);
		break;
	default:
		GUEST_FAIL("Unknown operation %lu", op->type);
	}
}

static void guest_code(void)
{
	u64 i;

	x2apic_enable();

	for (;;) {
		guest.outcome.nr_pmis = 0;

		for (i = 0; guest.ops[i].type != OP_END; i++) {
			WRITE_ONCE(guest.op, i);
			WRITE_ONCE(guest.iteration, 0);
			guest_do_op(&guest.counter, &guest.ops[i], &guest.outcome.values[i]);
		}

		WRITE_ONCE(guest.op, i);
		WRITE_ONCE(guest.iteration, 0);
		GUEST_DONE();
	}
}

static int advance_fd;

/* Let @nr events happen on this CPU, i.e. while this task's counters count. */
static void advance(u64 event, u64 nr)
{
	char line[64];
	int len;

	len = snprintf(line, sizeof(line), "0x%lx %lu", event, nr);
	TEST_ASSERT(write(advance_fd, line, len) == len,
		    "Failed to write to " SOFTPMU_ADVANCE);
}

/*
 * The model.  An instruction is counted if the counter is enabled after it has
 * been emulated, i.e. a WRMSR that enables the counter is, and one that disables
 * it isn't.
 */
static struct model {
	const struct counter *c;
	u64 value;
	bool enabled, globally_enabled, denied;
	u64 status;

	/* Where the script stands. */
	u64 op, iteration;
	u64 nr_overflows;
} model;

static void model_count(u64 nr)
{
	if (!model.enabled || !model.globally_enabled || model.denied)
		return;

	model.value += nr;
	if (model.value <= COUNTER_MASK)
		return;

	model.value &= COUNTER_MASK;
	model.status |= model.c->global_ctrl;
	model.nr_overflows++;

	TEST_ASSERT(wanted.nr_pmis < MAX_PMIS, "Too many PMIs for one script");
	wanted.pmis[wanted.nr_pmis].op = model.op;
	wanted.pmis[wanted.nr_pmis++].iteration = model.iteration;
}

static u64 model_left(void)
{
	return COUNTER_MASK + 1 - model.value;
}

/* Append an operation to the script, and play it with the model. */
static void add_op(enum op_type type, u64 arg)
{
	u64 i;

	TEST_ASSERT(model.op < MAX_OPS, "Too many operations for one script");

	ops[model.op].type = type;
	ops[model.op].arg = arg;
	model.iteration = 0;

	switch (type) {
	case OP_NATIVE:
		/* In this order, get_ucall() completes the instruction. */
		model_count(1);
		model_count(arg);
		model.op++;
		return;
	case OP_EMULATE:
		for (i = 0; i < arg; i++) {
			model.iteration = i;
			model_count(1);
		}
		model.op++;
		return;
	case OP_WRITE:
		model.value = arg;
		break;
	case OP_STOP:
	case OP_START:
		model.enabled = type == OP_START;
		break;
	case OP_GLOBAL_STOP:
	case OP_GLOBAL_START:
		model.globally_enabled = type == OP_GLOBAL_START;
		break;
	case OP_READ:
		wanted.values[model.op] = model.value;
		break;
	case OP_STATUS:
		wanted.values[model.op] = model.status;
		break;
	case OP_CLEAR:
		model.status = 0;
		break;
	default:
		break;
	}

	model_count(1);
	model.op++;
}

static u64 random_below(u64 n)
{
	return kvm_random_u64(&kvm_rng) % n;
}

/* A distance to overflow: 1 to 2^20, each power of two as likely as the others. */
static u64 random_distance(void)
{
	if (!random_below(50))
		return BIT_ULL(47) - random_below(1000);

	return 1 + random_below(BIT_ULL(random_below(21)));
}

static void check(bool ok, const char *what, u64 op, u64 value, u64 expected)
{
	TEST_ASSERT(ok, "%s, seed 0x%x, after %lu: %lu (%s 0x%lx): %s: wanted 0x%lx, got 0x%lx",
		    model.c->name, kvm_random_seed, model.nr_overflows, op, op_names[ops[op].type],
		    ops[op].arg, what, expected, value);
}

/* Have the guest work off the script, and compare. */
static void run_script(struct kvm_vcpu *vcpu)
{
	struct outcome *got = &shared->outcome;
	bool done = false;
	struct ucall uc;
	u64 i;

	ops[model.op].type = OP_END;

	while (!done) {
		vcpu_run(vcpu);
		switch (get_ucall(vcpu, &uc)) {
		case UCALL_SYNC:
			advance(model.c->event, uc.args[1]);
			break;
		case UCALL_DONE:
			done = true;
			break;
		default:
			REPORT_GUEST_ASSERT(uc);
		}
	}

	for (i = 0; i < got->nr_pmis || i < wanted.nr_pmis; i++) {
		if (i == got->nr_pmis)
			check(false, "PMI is missing", wanted.pmis[i].op, got->nr_pmis,
			      wanted.nr_pmis);
		if (i == wanted.nr_pmis)
			check(false, "PMI too many", got->pmis[i].op, got->nr_pmis,
			      wanted.nr_pmis);

		check(got->pmis[i].op == wanted.pmis[i].op, "PMI is early or late",
		      wanted.pmis[i].op, got->pmis[i].op, wanted.pmis[i].op);
		check(got->pmis[i].iteration == wanted.pmis[i].iteration,
		      "PMI in the wrong iteration", wanted.pmis[i].op,
		      got->pmis[i].iteration, wanted.pmis[i].iteration);
	}

	for (i = 0; i < model.op; i++) {
		if (ops[i].type != OP_READ && ops[i].type != OP_STATUS)
			continue;
		check(got->values[i] == wanted.values[i], "value", i, got->values[i],
		      wanted.values[i]);
	}

	/* get_ucall() has completed the instruction that ended the script. */
	wanted.nr_pmis = 0;
	model.op = 0;
	model.iteration = 0;
	model_count(1);
	TEST_ASSERT(!wanted.nr_pmis, "The script must not end right before an overflow");
}

/* One or a few events, emulated or not, but not more than one overflow. */
static void add_random_events(void)
{
	u64 left = model_left(), nr;

	switch (random_below(8)) {
	case 0:
		add_op(OP_EMULATE, 1);
		break;
	case 1:
		add_op(OP_EMULATE, 1 + random_below(8));
		break;
	case 2:
		/* Right up to the overflow, or past it. */
		nr = left - min_t(u64, left, 2) + random_below(4);
		add_op(OP_EMULATE, nr < 2000 ? nr : 1 + random_below(300));
		break;
	case 3:
		/* One short of it, counting the instruction that exits. */
		if (left > 2)
			add_op(OP_NATIVE, left - 2);
		break;
	case 4:
		add_op(OP_NATIVE, left - 1);
		break;
	case 5:
		add_op(OP_NATIVE, left + random_below(3));
		break;
	case 6:
		add_op(OP_NATIVE, random_below(left));
		break;
	case 7:
		add_op(OP_READ, 0);
		break;
	}
}

/* Write the counter, running or not, and let it overflow. */
static void add_random_round(void)
{
	const struct counter *c = model.c;
	u64 overflows = model.nr_overflows;
	u64 value = -random_distance() & COUNTER_MASK;
	int i;

	switch (random_below(c->global_ctrl_msr ? 3 : 2)) {
	case 0:
		add_op(OP_ARM, 0);
		add_op(OP_WRITE, value);
		break;
	case 1:
		add_op(OP_STOP, 0);
		add_op(OP_ARM, 0);
		add_op(OP_WRITE, value);
		add_op(OP_START, 0);
		break;
	case 2:
		add_op(OP_GLOBAL_STOP, 0);
		add_op(OP_ARM, 0);
		add_op(OP_WRITE, value);
		add_op(OP_GLOBAL_START, 0);
		break;
	}

	while (model.nr_overflows == overflows)
		add_random_events();

	/* Neither must it overflow again, nor must its value be lost. */
	for (i = random_below(4); i; i--)
		add_op(OP_EMULATE, 1 + random_below(4));
	add_op(OP_READ, 0);
	if (c->global_status_msr) {
		add_op(OP_STATUS, 0);
		add_op(OP_CLEAR, 0);
	}
}

static void set_filter(struct kvm_vm *vm, bool deny)
{
	struct {
		struct kvm_pmu_event_filter filter;
		u64 event;
	} f = {
		/* Denying nothing allows everything. */
		.filter = {
			.action = KVM_PMU_EVENT_DENY,
			.nevents = deny,
			.fixed_counter_bitmap = deny ? ~0u : 0,
		},
		.event = model.c->event,
	};

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, &f.filter);
	model.denied = deny;
}

/* Nothing of this must be counted. */
static void run_denied_script(struct kvm_vcpu *vcpu)
{
	int i;

	set_filter(vcpu->vm, true);
	for (i = 0; i < 20; i++) {
		add_op(OP_EMULATE, 1 + random_below(20));
		add_op(OP_NATIVE, 1 + random_below(BIT_ULL(20)));
		add_op(OP_READ, 0);
	}
	run_script(vcpu);
	set_filter(vcpu->vm, false);
}

static void *read_counter(void *vcpu)
{
	return (void *)vcpu_get_msr(vcpu, model.c->counter_msr);
}

/*
 * What may happen to a vCPU between two KVM_RUNs: its task moves to another CPU or
 * is scheduled out, userspace reads the counter, be it from another task, writes
 * what it has read, or forbids the event for some time.
 */
static void disturb(struct kvm_vcpu *vcpu)
{
	u32 nr_cpus = sysconf(_SC_NPROCESSORS_ONLN);
	pthread_t thread;
	void *value;

	switch (random_below(8)) {
	case 0:
		pin_self_to_cpu(random_below(nr_cpus));
		break;
	case 1:
		usleep(1);
		break;
	case 2:
		value = read_counter(vcpu);
		TEST_ASSERT((u64)value == model.value, "KVM_GET_MSRS: wanted 0x%lx, got 0x%lx",
			    model.value, (u64)value);
		break;
	case 3:
		TEST_ASSERT(!pthread_create(&thread, NULL, read_counter, vcpu) &&
			    !pthread_join(thread, &value), "Failed to run a thread");
		TEST_ASSERT((u64)value == model.value,
			    "KVM_GET_MSRS from another task: wanted 0x%lx, got 0x%lx",
			    model.value, (u64)value);
		break;
	case 4:
		vcpu_set_msr(vcpu, model.c->counter_msr,
			     vcpu_get_msr(vcpu, model.c->counter_msr));
		break;
	case 5:
		run_denied_script(vcpu);
		break;
	}
}

static struct kvm_vm *create_vm(const struct counter *c, struct kvm_vcpu **vcpu)
{
	struct kvm_vm *vm;

	vm = vm_create_with_one_vcpu(vcpu, guest_code);
	vm_install_exception_handler(vm, NMI_VECTOR, guest_nmi_handler);

	guest.counter = *c;
	sync_global_to_guest(vm, guest);
	shared = addr_gva2hva(vm, (gva_t)&guest);
	ops = shared->ops;

	memset(&wanted, 0, sizeof(wanted));
	memset(&model, 0, sizeof(model));
	model.c = c;
	model.globally_enabled = !c->global_ctrl_msr;
	return vm;
}

static void set_up_counter(u64 distance)
{
	if (model.c->global_ctrl_msr)
		add_op(OP_GLOBAL_STOP, 0);
	add_op(OP_ARM, 0);
	add_op(OP_WRITE, -distance & COUNTER_MASK);
	add_op(OP_START, 0);
	if (model.c->global_ctrl_msr)
		add_op(OP_GLOBAL_START, 0);
}

static void test_random(const struct counter *c, u64 nr_overflows)
{
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	u64 next = 0;

	vm = create_vm(c, &vcpu);
	set_up_counter(1000);

	while (model.nr_overflows < nr_overflows) {
		while (model.op < MAX_OPS - 200 && wanted.nr_pmis < MAX_PMIS - 2)
			add_random_round();
		run_script(vcpu);
		disturb(vcpu);

		if (model.nr_overflows >= next) {
			pr_info("# %s: %lu of %lu overflows\n", c->name,
				model.nr_overflows, nr_overflows);
			next += nr_overflows / 4;
		}
	}

	kvm_vm_free(vm);
	pr_info("%s: %lu overflows, each raised once and at the right event\n",
		c->name, model.nr_overflows);
}

static bool stop_spinning;

static void *spin(void *unused)
{
	pin_self_to_cpu(0);
	while (!READ_ONCE(stop_spinning))
		;
	return NULL;
}

/*
 * Take all counters of this CPU away from the guest, and give them back.  perf
 * stops the guest's event for good, only KVM can start it again, and is supposed
 * to do so when an event is emulated after the vCPU's task has been preempted.
 */
static void test_contention(const struct counter *c)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_RAW,
		.size = sizeof(attr),
		.config = c->event,
		.pinned = 1,
	};
	struct kvm_vcpu *vcpu;
	pthread_t spinner;
	int fds[8], nr, i;
	struct kvm_vm *vm;
	u64 value;

	pin_self_to_cpu(0);
	vm = create_vm(c, &vcpu);
	set_up_counter(BIT_ULL(40));
	add_op(OP_EMULATE, 10);
	add_op(OP_NATIVE, 1000);
	add_op(OP_READ, 0);
	run_script(vcpu);

	/* Events that don't get a counter don't do any harm. */
	for (nr = 0; nr < ARRAY_SIZE(fds); nr++) {
		fds[nr] = syscall(__NR_perf_event_open, &attr, -1, 0, -1, 0);
		TEST_ASSERT(fds[nr] >= 0, "Failed to open a perf event: %d", errno);
	}

	/* Emulated events are counted nonetheless, others can't be. */
	add_op(OP_EMULATE, 10);
	add_op(OP_READ, 0);
	run_script(vcpu);
	advance(c->event, 1000);
	value = vcpu_get_msr(vcpu, c->counter_msr);
	TEST_ASSERT(value == model.value, "%s: without counters: wanted 0x%lx, got 0x%lx",
		    c->name, model.value, value);

	for (i = 0; i < nr; i++)
		close(fds[i]);

	/* Far less events than what KVM could accumulate at this distance. */
	TEST_ASSERT(!pthread_create(&spinner, NULL, spin, NULL), "Failed to create a thread");
	add_op(OP_EMULATE, 20000);
	run_script(vcpu);
	WRITE_ONCE(stop_spinning, true);
	pthread_join(spinner, NULL);
	WRITE_ONCE(stop_spinning, false);

	add_op(OP_EMULATE, 2);
	add_op(OP_NATIVE, 1000);
	add_op(OP_READ, 0);
	run_script(vcpu);

	kvm_vm_free(vm);
	pr_info("%s: counts again after all counters were taken\n", c->name);
}

static u64 read_stat(const char *name)
{
	char key[32];
	u64 val;
	FILE *f;

	f = fopen(SOFTPMU_STATS, "r");
	TEST_ASSERT(f, "Failed to open " SOFTPMU_STATS);
	while (fscanf(f, "%31s %lu", key, &val) == 2) {
		if (!strcmp(key, name)) {
			fclose(f);
			return val;
		}
	}
	TEST_FAIL("No '%s' in " SOFTPMU_STATS, name);
	return 0;
}

/*
 * A guest that samples: it writes the counter in the handler of each PMI, here
 * while it is stopped, and starts it.  In between, events happen in steps.
 */
static void test_sampling(const struct counter *c, u64 event, u64 period,
			  u64 nr_steps, u64 nr_emulated, u64 nr_samples)
{
	static const char * const stats[] = { "interrupts", "overflows", "period", "add" };
	struct counter sampler = *c;
	u64 start[ARRAY_SIZE(stats)];
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	bool counts_insns;
	u64 nr_pmis = 0;
	u64 i, j;

	counts_insns = event == c->event;
	if (!counts_insns) {
		/* Count what isn't emulated. */
		sampler.ctrl = GP_CTRL | event;
		sampler.event = event;
	}

	vm = create_vm(&sampler, &vcpu);
	for (i = 0; i < ARRAY_SIZE(stats); i++)
		start[i] = read_stat(stats[i]);

	for (i = 0; i < nr_samples; i++) {
		model.enabled = false;
		model.globally_enabled = false;
		if (sampler.global_ctrl_msr)
			add_op(OP_GLOBAL_STOP, 0);
		else
			add_op(OP_STOP, 0);
		add_op(OP_ARM, 0);
		add_op(OP_WRITE, -period & COUNTER_MASK);
		add_op(OP_START, 0);
		if (sampler.global_ctrl_msr)
			add_op(OP_GLOBAL_START, 0);
		for (j = 0; j < nr_steps; j++) {
			if (nr_emulated)
				add_op(OP_EMULATE, nr_emulated);
			add_op(OP_NATIVE, period / nr_steps);
		}
		/* No more than what overflows, the model isn't used here. */
		ops[model.op].type = OP_END;
		model.op = 0;
		wanted.nr_pmis = 0;

		for (;;) {
			struct ucall uc;

			vcpu_run(vcpu);
			switch (get_ucall(vcpu, &uc)) {
			case UCALL_SYNC:
				advance(event, uc.args[1]);
				continue;
			case UCALL_DONE:
				break;
			default:
				REPORT_GUEST_ASSERT(uc);
			}
			break;
		}
		nr_pmis += shared->outcome.nr_pmis;
	}

	printf("%s, %s, period %lu, %lu emulated: pmis %.2f", c->name,
	       counts_insns ? "insns" : "cycles", period,
	       counts_insns ? nr_steps * (nr_emulated + 1) : 0,
	       (double)nr_pmis / nr_samples);
	for (i = 0; i < ARRAY_SIZE(stats); i++)
		printf(" %s %.2f", stats[i],
		       (double)(read_stat(stats[i]) - start[i]) / nr_samples);
	printf("\n");

	kvm_vm_free(vm);
}

/*
 * An overflow must be visible once KVM_RUN has returned without entering the guest,
 * because userspace may save the vCPU's state then.  The last event before the
 * overflow is either the instruction that has exited to userspace, which KVM
 * completes in the next KVM_RUN, or one that follows it and isn't emulated.
 */
static void test_save(const struct counter *c, bool native)
{
	const char *event = native ? "native" : "emulated";
	struct kvm_vcpu_events events;
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	u64 value;

	vm = create_vm(c, &vcpu);
	set_up_counter(100);
	add_op(OP_EMULATE, model_left() - 1 - native);
	add_op(OP_NATIVE, 0);
	ops[model.op].type = OP_END;

	vcpu_run(vcpu);
	TEST_ASSERT_KVM_EXIT_REASON(vcpu, KVM_EXIT_IO);
	vcpu_run_complete_io(vcpu);

	if (native) {
		advance(c->event, 1);
		vcpu_run_complete_io(vcpu);
	}

	value = vcpu_get_msr(vcpu, c->counter_msr);
	TEST_ASSERT(!value, "%s, %s event: wanted count 0, got 0x%lx", c->name, event, value);

	if (c->global_status_msr) {
		value = vcpu_get_msr(vcpu, c->global_status_msr);
		TEST_ASSERT(value == c->global_ctrl,
			    "%s, %s event: wanted status 0x%lx, got 0x%lx", c->name,
			    event, c->global_ctrl, value);
	}

	vcpu_events_get(vcpu, &events);
	TEST_ASSERT(events.nmi.pending + events.nmi.injected == 1,
		    "%s, %s event: wanted 1 NMI to be pending, got %u", c->name, event,
		    events.nmi.pending + events.nmi.injected);

	kvm_vm_free(vm);
	pr_info("%s: userspace sees the overflow by the %s event\n", c->name, event);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	TEST_ASSERT(fd >= 0 && write(fd, text, strlen(text)) == strlen(text),
		    "Failed to write '%s' to %s", text, path);
	close(fd);
}

static void help(const char *name)
{
	printf("usage: %s [-n OVERFLOWS] [-r SEED] [-s]\n\n"
	       " -n  overflows for each counter (default %d)\n"
	       " -r  the random seed, as printed by an earlier run\n"
	       " -s  print what a sampling guest makes perf do, and nothing else\n",
	       name, DEFAULT_NR_OVERFLOWS);
	exit(0);
}

int main(int argc, char *argv[])
{
	bool sampling = false;
	const struct counter *counters;
	u64 nr_overflows = DEFAULT_NR_OVERFLOWS;
	int nr_counters, opt, i;
	u64 cycles;

	while ((opt = getopt(argc, argv, "hn:r:s")) != -1) {
		switch (opt) {
		case 'n':
			nr_overflows = atoi_positive("Number of overflows", optarg);
			break;
		case 'r':
			kvm_random_seed = strtoul(optarg, NULL, 0);
			kvm_rng = new_kvm_random_state(kvm_random_seed);
			break;
		case 's':
			sampling = true;
			break;
		default:
			help(argv[0]);
		}
	}

	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(!access(SOFTPMU_ADVANCE, W_OK));

	advance_fd = open(SOFTPMU_ADVANCE, O_WRONLY);
	TEST_ASSERT(advance_fd >= 0, "Failed to open " SOFTPMU_ADVANCE);

	/* Neither throttle, nor let an overflow be one event late. */
	write_file("/proc/sys/kernel/perf_event_max_sample_rate", "100000000");
	write_file(SOFTPMU_EXACT, "1");

	if (host_cpu_is_amd_compatible) {
		counters = amd_counters;
		nr_counters = ARRAY_SIZE(amd_counters);
		cycles = AMD_ZEN_CORE_CYCLES;
	} else {
		counters = intel_counters;
		nr_counters = ARRAY_SIZE(intel_counters);
		cycles = INTEL_ARCH_CPU_CYCLES;
	}

	for (i = 0; i < nr_counters; i++) {
		if (sampling) {
			if (counters[i].ctrl_msr != MSR_CORE_PERF_FIXED_CTR_CTRL)
				test_sampling(&counters[i], cycles, 100000, 10, 5, 200);
			test_sampling(&counters[i], counters[i].event, 100000, 1, 0, 100);
			test_sampling(&counters[i], counters[i].event, 100000, 10, 0, 100);
			test_sampling(&counters[i], counters[i].event, 100000, 50, 1, 100);
			test_sampling(&counters[i], counters[i].event, 100000, 50, 100, 100);
		} else {
			test_save(&counters[i], false);
			test_save(&counters[i], true);
			test_contention(&counters[i]);
			test_random(&counters[i], nr_overflows);
		}
	}

	return 0;
}
