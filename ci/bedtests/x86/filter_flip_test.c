// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test that a new event filter applies as soon as userspace has been told so
 *
 * Two vCPUs count the instructions that KVM emulates for them, while a third
 * thread allows and denies the event.  Once KVM_SET_PMU_EVENT_FILTER has returned,
 * no instruction may be judged by the old filter, no matter where the vCPUs are at
 * that time: the thread raises a flag in the guests' memory, and an instruction
 * that a guest executes after it has seen the flag has to count, or must not.
 *
 * A vCPU reads the counter before and after a few emulated instructions.  If the
 * flag is the same before and after that, i.e. if the filter was one and the same
 * for all of them, the difference of the two reads has to be exactly the number of
 * instructions, or none.
 *
 * Whether that hits a vCPU between its exit and the emulation of the instruction
 * is up to chance, and unlikely in an emulator.  So do the same with an instruction
 * that exits to userspace: change the filter before KVM completes the instruction.
 *
 * Native events would be in the way, i.e. the test is for the test beds only.
 */
#include <pthread.h>

#include "test_util.h"
#include "kvm_util.h"
#include "processor.h"
#include "pmu.h"

#define NR_VCPUS	2
#define NR_INSNS	20

/* How many times each vCPU has to find the event allowed, and denied. */
#define NR_ROUNDS	300

/*
 * Written by the thread that changes the filter: odd while it does so.  Bit 1 says
 * what the filter is otherwise.
 */
#define FLIPPING	BIT(0)
#define DENIED		BIT(1)

static u64 guest_filter;

static u32 guest_eventsel_msr, guest_counter_msr, guest_global_ctrl_msr;
static u64 guest_eventsel;

static void guest_code(u64 id)
{
	u64 nr[2] = {}, filter, count, wanted;
	u32 eax, ebx, ecx, edx;
	int i;

	wrmsr(guest_eventsel_msr, guest_eventsel);
	if (guest_global_ctrl_msr)
		wrmsr(guest_global_ctrl_msr, 1);

	while (nr[0] < NR_ROUNDS || nr[1] < NR_ROUNDS) {
		filter = READ_ONCE(guest_filter);
		if (filter & FLIPPING) {
			cpu_relax();
			continue;
		}

		/* The first RDMSR retires after it has read the counter. */
		count = rdmsr(guest_counter_msr);
		for (i = 0; i < NR_INSNS; i++)
			cpuid(0, &eax, &ebx, &ecx, &edx);
		count = rdmsr(guest_counter_msr) - count;

		/* The upper bits tell that the filter was changed, and back. */
		if (READ_ONCE(guest_filter) != filter)
			continue;

		wanted = filter & DENIED ? 0 : NR_INSNS + 1;
		__GUEST_ASSERT(count == wanted,
			       "vCPU %lu, filter %lx: wanted %lu events, got %lu",
			       id, filter, wanted, count);
		nr[!!(filter & DENIED)]++;
	}

	GUEST_DONE();
}

/* Instructions that KVM completes after userspace has had its say. */
static void guest_exit_to_userspace(void)
{
	wrmsr(guest_eventsel_msr, guest_eventsel);
	if (guest_global_ctrl_msr)
		wrmsr(guest_global_ctrl_msr, 1);

	for (;;)
		GUEST_SYNC(0);
}

static struct kvm_vm *vm;
static u64 *filter_state;
static bool done;

static void set_filter(bool deny)
{
	struct {
		struct kvm_pmu_event_filter filter;
		u64 event;
	} f = {
		/* Denying nothing allows everything. */
		.filter.action = KVM_PMU_EVENT_DENY,
		.filter.nevents = deny,
		.event = guest_eventsel & (ARCH_PERFMON_EVENTSEL_EVENT |
					   ARCH_PERFMON_EVENTSEL_UMASK),
	};

	vm_ioctl(vm, KVM_SET_PMU_EVENT_FILTER, &f.filter);
}

static void *flip_filter(void *unused)
{
	u64 state = 0;

	while (!READ_ONCE(done)) {
		WRITE_ONCE(*filter_state, state | FLIPPING);
		set_filter(!(state & DENIED));

		/* Count up, with DENIED as the lowest bit of the count. */
		state += DENIED;
		WRITE_ONCE(*filter_state, state);
		usleep(kvm_random_u32(&kvm_rng) % 3000);
	}

	return NULL;
}

static void *run_vcpu(void *arg)
{
	struct kvm_vcpu *vcpu = arg;
	struct ucall uc;

	vcpu_run(vcpu);
	switch (get_ucall(vcpu, &uc)) {
	case UCALL_DONE:
		break;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("Unexpected exit reason: %s",
			  exit_reason_str(vcpu->run->exit_reason));
	}

	return NULL;
}

static void set_up_guest(void)
{
	sync_global_to_guest(vm, guest_eventsel_msr);
	sync_global_to_guest(vm, guest_counter_msr);
	sync_global_to_guest(vm, guest_global_ctrl_msr);
	sync_global_to_guest(vm, guest_eventsel);
	set_filter(false);
}

static void test_completion(void)
{
	struct kvm_vcpu *vcpu;
	bool deny, was_denied;
	u64 before, after;
	int i;

	vm = vm_create_with_one_vcpu(&vcpu, guest_exit_to_userspace);
	set_up_guest();

	for (i = 0; i < 8; i++) {
		was_denied = i & 1;
		deny = i & 2;

		set_filter(was_denied);
		/* vcpu_run() would complete the instruction. */
		TEST_ASSERT(!__vcpu_run(vcpu), "KVM_RUN failed, errno: %d", errno);
		TEST_ASSERT_KVM_EXIT_REASON(vcpu, KVM_EXIT_IO);

		before = vcpu_get_msr(vcpu, guest_counter_msr);
		set_filter(deny);
		vcpu_run_complete_io(vcpu);
		after = vcpu_get_msr(vcpu, guest_counter_msr);

		TEST_ASSERT(after - before == !deny,
			    "Filter changed from %s to %s: wanted %u events, got %lu",
			    was_denied ? "deny" : "allow", deny ? "deny" : "allow",
			    !deny, after - before);
	}

	kvm_vm_free(vm);
}

int main(void)
{
	struct kvm_vcpu *vcpus[NR_VCPUS];
	pthread_t threads[NR_VCPUS], flipper;
	int i;

	TEST_REQUIRE(kvm_is_pmu_enabled());
	TEST_REQUIRE(kvm_has_cap(KVM_CAP_PMU_EVENT_FILTER));
	TEST_REQUIRE(!access("/sys/kernel/debug/softpmu", F_OK));

	guest_eventsel = ARCH_PERFMON_EVENTSEL_OS | ARCH_PERFMON_EVENTSEL_USR |
			 ARCH_PERFMON_EVENTSEL_ENABLE;
	if (host_cpu_is_amd_compatible) {
		guest_eventsel_msr = MSR_K7_EVNTSEL0;
		guest_counter_msr = MSR_K7_PERFCTR0;
		guest_eventsel |= AMD_ZEN_INSTRUCTIONS_RETIRED;
	} else {
		guest_eventsel_msr = MSR_P6_EVNTSEL0;
		guest_counter_msr = MSR_IA32_PERFCTR0;
		guest_global_ctrl_msr = MSR_CORE_PERF_GLOBAL_CTRL;
		guest_eventsel |= INTEL_ARCH_INSTRUCTIONS_RETIRED;
	}

	test_completion();

	vm = vm_create_with_vcpus(NR_VCPUS, guest_code, vcpus);
	set_up_guest();
	filter_state = addr_gva2hva(vm, (gva_t)&guest_filter);

	for (i = 0; i < NR_VCPUS; i++) {
		vcpu_args_set(vcpus[i], 1, (u64)i);
		TEST_ASSERT(!pthread_create(&threads[i], NULL, run_vcpu, vcpus[i]),
			    "Failed to create a thread");
	}
	TEST_ASSERT(!pthread_create(&flipper, NULL, flip_filter, NULL),
		    "Failed to create a thread");

	for (i = 0; i < NR_VCPUS; i++)
		pthread_join(threads[i], NULL);
	WRITE_ONCE(done, true);
	pthread_join(flipper, NULL);

	pr_info("%lu changes of the filter, each in force when it should be\n",
		*filter_state / DENIED);
	kvm_vm_free(vm);
	return 0;
}
