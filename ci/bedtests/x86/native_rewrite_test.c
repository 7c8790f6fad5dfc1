// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a counter which is written while it runs overflows in time
 *
 * As softpmu_rewrite_test, with events of the CPU itself: preset a counter of
 * cycles, let it count half of the way, preset it again without stopping it.
 * It must overflow once it wraps, and not later by what it counted before.
 */
#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "apic.h"
#include "pmu.h"

#define APIC_LVTPC	0x340

#define COUNTER_MASK	(BIT_ULL(48) - 1)
#define NR_LEFT		100000ull

static u64 guest_nr_nmis;

static void guest_nmi_handler(struct ex_regs *regs)
{
	guest_nr_nmis++;
}

/* At least @nr cycles pass. */
static void guest_spin(u64 nr)
{
	asm volatile("1: dec %0\n\tjnz 1b" : "+r" (nr) : : "cc");
}

static void guest_code(void)
{
	x2apic_enable();
	x2apic_write_reg(APIC_LVTPC, APIC_DM_NMI);

	wrmsr(MSR_K7_PERFCTR0, -NR_LEFT & COUNTER_MASK);
	wrmsr(MSR_K7_EVNTSEL0, ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_USR |
			       ARCH_PERFMON_EVENTSEL_INT | ARCH_PERFMON_EVENTSEL_ENABLE |
			       AMD_ZEN_CORE_CYCLES);
	/* DEC and JNZ: one cycle each on the test bed */
	guest_spin(NR_LEFT / 4);
	GUEST_SYNC(guest_nr_nmis);

	wrmsr(MSR_K7_PERFCTR0, -NR_LEFT & COUNTER_MASK);
	guest_spin(NR_LEFT / 2 + NR_LEFT / 8);
	GUEST_SYNC(guest_nr_nmis);
	GUEST_SYNC(rdmsr(MSR_K7_PERFCTR0));
	GUEST_DONE();
}

static u64 next_sync(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	if (get_ucall(vcpu, &uc) != UCALL_SYNC)
		REPORT_GUEST_ASSERT(uc);
	return uc.args[1];
}

int main(void)
{
	struct kvm_vcpu *vcpu;
	struct kvm_vm *vm;
	u64 nr, value;

	TEST_REQUIRE(host_cpu_is_amd_compatible);
	TEST_REQUIRE(kvm_is_pmu_enabled());

	vm = vm_create_with_one_vcpu(&vcpu, guest_code);
	vm_install_exception_handler(vm, NMI_VECTOR, guest_nmi_handler);

	nr = next_sync(vcpu);
	TEST_ASSERT(!nr, "Wanted no PMI halfway, got %lu", nr);
	nr = next_sync(vcpu);
	value = next_sync(vcpu);
	/* Neither counts by itself, nor wrapped. */
	__TEST_REQUIRE(nr || value < NR_LEFT, "the CPU counts no cycles");
	TEST_ASSERT(nr == 1, "Wanted 1 PMI after the counter wrapped to %lu, got %lu",
		    value, nr);

	kvm_vm_free(vm);
	return 0;
}
