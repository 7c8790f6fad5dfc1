// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a counter which is written while it runs overflows in time
 *
 * Preset a counter, let it count, preset it again without stopping it: it must
 * overflow when it wraps, and not later by what it counted before the second
 * write.  KVM doesn't emulate any of the events, they come from softpmu, i.e.
 * the test is for the test beds only.
 */
#include <fcntl.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

#define APIC_LVTPC	0x340

/* Events that are left to the overflow after each write. */
#define NR_LEFT		1000
#define NR_BEFORE_WRITE	500

#define SOFTPMU_ADVANCE	"/sys/kernel/debug/softpmu/advance"

/* All counters are 48 bits wide on the test beds. */
#define COUNTER_MASK	(BIT_ULL(48) - 1)

struct counter {
	const char *name;
	u32 ctrl_msr;
	u32 counter_msr;
	u32 global_ctrl_msr;
	u64 global_ctrl;
	u64 ctrl;
	u64 event;
};

#define GP_CTRL		(ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_USR |	\
			 ARCH_PERFMON_EVENTSEL_INT | ARCH_PERFMON_EVENTSEL_ENABLE)

static const struct counter amd_counters[] = {
	{
		.name = "counter 0",
		.ctrl_msr = MSR_K7_EVNTSEL0,
		.counter_msr = MSR_K7_PERFCTR0,
		.ctrl = GP_CTRL | AMD_ZEN_CORE_CYCLES,
		.event = AMD_ZEN_CORE_CYCLES,
	},
};

static const struct counter intel_counters[] = {
	{
		.name = "general purpose counter 0",
		.ctrl_msr = MSR_P6_EVNTSEL0,
		.counter_msr = MSR_IA32_PERFCTR0,
		.global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL,
		.global_ctrl = BIT_ULL(0),
		.ctrl = GP_CTRL | INTEL_ARCH_CPU_CYCLES,
		.event = INTEL_ARCH_CPU_CYCLES,
	},
	{
		.name = "fixed counter 1",
		.ctrl_msr = MSR_CORE_PERF_FIXED_CTR_CTRL,
		.counter_msr = MSR_CORE_PERF_FIXED_CTR1,
		.global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL,
		.global_ctrl = FIXED_PMC_GLOBAL_CTRL_ENABLE(1),
		.ctrl = FIXED_PMC_CTRL(1, FIXED_PMC_KERNEL | FIXED_PMC_USER |
					  FIXED_PMC_ENABLE_PMI),
		.event = INTEL_ARCH_CPU_CYCLES,
	},
};

static struct counter guest_counter;
static u64 guest_value;
static u64 guest_nr_nmis;

static void guest_nmi_handler(struct ex_regs *regs)
{
	WRITE_ONCE(guest_nr_nmis, guest_nr_nmis + 1);
}

static void guest_code(void)
{
	const struct counter *c = &guest_counter;

	x2apic_enable();
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

	wrmsr(c->counter_msr, -NR_LEFT & COUNTER_MASK);
	if (c->global_ctrl_msr)
		wrmsr(c->global_ctrl_msr, c->global_ctrl);
	wrmsr(c->ctrl_msr, c->ctrl);
	GUEST_SYNC(0);

	wrmsr(c->counter_msr, -NR_LEFT & COUNTER_MASK);

	for (;;) {
		GUEST_SYNC(0);
		guest_value = rdmsr(c->counter_msr);
	}
}

static void run_until_sync(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	if (get_ucall(vcpu, &uc) != UCALL_SYNC)
		REPORT_GUEST_ASSERT(uc);
}

/* Let @nr events happen on this CPU, i.e. while this task's counters count. */
static void advance(u64 event, u64 nr)
{
	char line[64];
	int fd, len;

	len = snprintf(line, sizeof(line), "0x%lx %lu", event, nr);

	fd = open(SOFTPMU_ADVANCE, O_WRONLY);
	TEST_ASSERT(fd >= 0 && write(fd, line, len) == len,
		    "Failed to write to " SOFTPMU_ADVANCE);
	close(fd);
}

static void test_rewrite(const struct counter *c)
{
	static const struct {
		u64 nr_events;
		s64 value;
		u64 nr_nmis;
	} steps[] = {
		{ 0,			-NR_LEFT,	0 },
		{ NR_LEFT - 1,		-1,		0 },
		{ 1,			0,		1 },
		{ NR_BEFORE_WRITE - 1,	499,		1 },
		{ 1,			500,		1 },
		{ NR_LEFT,		1500,		1 },
	};
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	u64 value;
	int i;

	guest_counter = *c;
	guest_nr_nmis = 0;

	vm = vm_create_with_one_vcpu(&vcpu, guest_code);
	vm_install_exception_handler(vm, NMI_VECTOR, guest_nmi_handler);
	sync_global_to_guest(vm, guest_counter);
	sync_global_to_guest(vm, guest_nr_nmis);

	run_until_sync(vcpu);
	advance(c->event, NR_BEFORE_WRITE);
	run_until_sync(vcpu);

	for (i = 0; i < ARRAY_SIZE(steps); i++) {
		advance(c->event, steps[i].nr_events);
		run_until_sync(vcpu);

		sync_global_from_guest(vm, guest_value);
		sync_global_from_guest(vm, guest_nr_nmis);
		value = steps[i].value & COUNTER_MASK;
		TEST_ASSERT(guest_value == value && guest_nr_nmis == steps[i].nr_nmis,
			    "%s, step %d: wanted count 0x%lx and %lu PMIs, got 0x%lx and %lu",
			    c->name, i, value, steps[i].nr_nmis, guest_value, guest_nr_nmis);
	}

	kvm_vm_free(vm);
}

int main(void)
{
	int i;

	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(!access(SOFTPMU_ADVANCE, W_OK));

	if (host_cpu_is_amd_compatible) {
		for (i = 0; i < ARRAY_SIZE(amd_counters); i++)
			test_rewrite(&amd_counters[i]);
		return 0;
	}

	for (i = 0; i < ARRAY_SIZE(intel_counters); i++)
		test_rewrite(&intel_counters[i]);

	return 0;
}
