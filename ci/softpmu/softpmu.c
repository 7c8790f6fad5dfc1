// SPDX-License-Identifier: GPL-2.0-only
/*
 * softpmu - a CPU PMU in software, for a kernel that has none
 *
 * KVM's perf-based virtual PMU needs a host PMU: a "cpu" PMU that takes raw
 * events, a PMU capability, and the selectors of the generic events.  Emulators
 * without a PMU give their kernel nothing of the kind, and KVM then turns its
 * virtual PMU off.  This module provides all of it, so that everything in KVM
 * between the guest's PMU registers and perf runs as it does on hardware.
 *
 * Load it before kvm.ko, which looks at the PMU only while it is loaded.  It is
 * a live patch; as with any of these, it can be removed only after
 * "echo 0 > /sys/kernel/livepatch/softpmu/enabled", and there should be no
 * reason to.  It refuses to load where a PMU exists already.
 *
 * What is modelled
 *
 *  - The host: AMD with 4 counters (6 with PERFCTR_CORE), version 1; Intel
 *    architectural perfmon version 2 with 4 general and 3 fixed counters.  All
 *    counters are 48 bits wide.
 *  - One set of counters per CPU.  A counter holds minus the events left to the
 *    next interrupt, counts up and interrupts when it wraps.  How many events
 *    may be left follows from perf's sample period by the rules of the x86
 *    driver: an interval that was overrun is shortened by as much, one overrun
 *    by a whole period or more is dropped, 1 is raised to 2, and more than
 *    2^47 - 1 is counted in parts, whose ends interrupt but overflow nothing.
 *    Limits of single CPU models are left out.
 *    That 1 becomes 2 has consequences, here as on hardware: whenever an event
 *    with 1 left is scheduled in, be it after a mere context switch, its
 *    overflow comes one event late, and never if it is scheduled out again in
 *    between.  The module parameter 'exact', writable at any time, turns that
 *    rule off, for tests of everything else.
 *  - Contention: an event that finds no counter fails to add with -EAGAIN, a
 *    group that never fits is refused when it is opened.  On Intel, one event
 *    each of 0x00c0, 0x003c and 0x0300 fits in the fixed counters, and 0x0300
 *    (reference cycles) fits nowhere else.
 *  - Overflow: the count is brought up to date, the counter is reloaded, then
 *    perf_event_overflow() is called, and the counter stops if perf says so.
 *    perf throttles here as everywhere: what happens while a counter is
 *    throttled is not counted.  Tests which overflow often want a high
 *    kernel.perf_event_max_sample_rate.
 *
 * What is not
 *
 *  - Nothing is counted by itself.  A counter moves when it is told to, see
 *    'advance' below; a guest's counter otherwise shows only what KVM emulates.
 *  - Whether a CPU is in guest mode.  A guest-only counter counts an advance
 *    whenever perf has its event scheduled and started on the CPU in question,
 *    which for a task's event means that the task is running there, in the
 *    guest, in KVM or in user space.
 *  - NMIs.  The overflow is raised with interrupts off, in the context of the
 *    writing task or of a cross-call.  perf asks for no more than that, and its
 *    own software events do the same.  KVM of 6.1 tells NMIs taken in
 *    the guest apart and sends its interrupt request through irq_work
 *    otherwise, which ends in the same place.  To the interrupted code the
 *    difference is that an NMI could also hit in a section with interrupts off.
 *  - The exit from the guest at an overflow, after which KVM reprograms the
 *    counter before the guest goes on.  N events that go beyond an overflow are
 *    all counted with the period that perf has set, so have a guest counter
 *    overflow no more than once per advance.
 *  - Skid: the counter wraps, interrupts and is reloaded between two events.
 *  - Counters that count the same advance do so one after the other.
 *  - The CMASK, INV, EDGE fields are accepted and ignored, as in KVM's own
 *    emulation of events.  An event restricted to transactions (IN_TX) never
 *    counts, as nothing here is in a transaction.
 *  - PERF_TYPE_HARDWARE and the cache events, precise events, branch stacks,
 *    RDPMC from user space, format and event names in sysfs.
 *
 * Files in debugfs, directory softpmu
 *
 *  stats    One "name value" per line, summed over all CPUs; writing anything
 *           sets all to zero.
 *             event_init, add, del, start, stop, read, pmu_enable, pmu_disable
 *                         calls by perf into this driver
 *             period      changes of a sample period by perf_event_period()
 *             add_failed  those of 'add' that found no counter
 *             interrupts  a counter wrapped
 *             overflows   those of 'interrupts' at which a period ended
 *             throttled   those of 'overflows' at which perf stopped the event
 *             advanced    a counter counted what was written to 'advance'
 *           Kernels differ in whether perf itself calls 'stop' to throttle.
 *  calls    add + del, a single number.
 *  events   The events that have a counter now.
 *  advance  Write "SELECTOR N [user|kernel] [all|CPU]": N events of that select
 *           and unit mask (0xc0, 0x412e) happen in guest mode, and each running
 *           counter for SELECTOR that is not restricted to the host counts
 *           them.  "user" and "kernel" say at which privilege they happen;
 *           without either, counters for both and for only one of them count.
 *           They happen on the CPU of the writing task, which is what a vCPU
 *           thread that writes for itself wants: its events are on that CPU
 *           whatever it is, no cross-call is needed, and no other vCPU is
 *           affected.  "all" or the number of a CPU is for everybody else.
 *           When the write returns, all overflows were raised.
 *           This file needs CONFIG_KPROBES.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/kernel.h>
#include <linux/kprobes.h>
#include <linux/livepatch.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/seq_file.h>
#include <linux/smp.h>
#include <linux/static_call.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include <asm/irq_regs.h>
#include <asm/perf_event.h>
#include <asm/processor.h>

#if !IS_ENABLED(CONFIG_LIVEPATCH)
#error "softpmu replaces two functions of perf, it needs CONFIG_LIVEPATCH"
#endif

#define SOFTPMU_WIDTH		48
#define SOFTPMU_WRAP		BIT_ULL(SOFTPMU_WIDTH)
#define SOFTPMU_MASK		(SOFTPMU_WRAP - 1)

/* The longest interval for which the top bit tells a wrap. */
#define SOFTPMU_MAX_LEFT	((s64)(SOFTPMU_WRAP / 2 - 1))

#define SOFTPMU_MAX_COUNTERS	8

static bool exact;
module_param(exact, bool, 0644);
MODULE_PARM_DESC(exact, "Load a counter for 1 event if 1 is left, not for 2 as the x86 driver does");

/* Counter classes: one fixed counter for each but the last, on Intel. */
enum softpmu_class {
	CLASS_INSTRUCTIONS,
	CLASS_CYCLES,
	CLASS_REF_CYCLES,
	CLASS_OTHER,
	NR_CLASSES
};

struct softpmu_model {
	unsigned int version;
	unsigned int num_gp;
	unsigned int num_fixed;
	/* Which bits of an event's config tell events apart. */
	u64 select_mask;
	u64 selectors[PERF_COUNT_HW_MAX];
};

static struct softpmu_model softpmu_amd __ro_after_init = {
	.version = 1,
	.num_gp = 4,
	.select_mask = AMD64_RAW_EVENT_MASK_NB,
	.selectors = {
		[PERF_COUNT_HW_CPU_CYCLES]		= 0x0076,
		[PERF_COUNT_HW_INSTRUCTIONS]		= 0x00c0,
		[PERF_COUNT_HW_CACHE_REFERENCES]	= 0xff60,
		[PERF_COUNT_HW_CACHE_MISSES]		= 0x0964,
		[PERF_COUNT_HW_BRANCH_INSTRUCTIONS]	= 0x00c2,
		[PERF_COUNT_HW_BRANCH_MISSES]		= 0x00c3,
		[PERF_COUNT_HW_STALLED_CYCLES_FRONTEND]	= 0x0287,
		[PERF_COUNT_HW_STALLED_CYCLES_BACKEND]	= 0x0187,
	},
};

static struct softpmu_model softpmu_intel __ro_after_init = {
	.version = 2,
	.num_gp = 4,
	.num_fixed = 3,
	.select_mask = INTEL_ARCH_EVENT_MASK | HSW_IN_TX,
	.selectors = {
		[PERF_COUNT_HW_CPU_CYCLES]		= 0x003c,
		[PERF_COUNT_HW_INSTRUCTIONS]		= 0x00c0,
		[PERF_COUNT_HW_CACHE_REFERENCES]	= 0x4f2e,
		[PERF_COUNT_HW_CACHE_MISSES]		= 0x412e,
		[PERF_COUNT_HW_BRANCH_INSTRUCTIONS]	= 0x00c4,
		[PERF_COUNT_HW_BRANCH_MISSES]		= 0x00c5,
		[PERF_COUNT_HW_BUS_CYCLES]		= 0x013c,
		[PERF_COUNT_HW_REF_CPU_CYCLES]		= 0x0300,
	},
};

static const struct softpmu_model *model __ro_after_init;

enum softpmu_stat {
	SPSTAT_EVENT_INIT,
	SPSTAT_ADD,
	SPSTAT_DEL,
	SPSTAT_START,
	SPSTAT_STOP,
	SPSTAT_READ,
	SPSTAT_PMU_ENABLE,
	SPSTAT_PMU_DISABLE,
	SPSTAT_PERIOD,
	SPSTAT_ADD_FAILED,
	SPSTAT_INTERRUPTS,
	SPSTAT_OVERFLOWS,
	SPSTAT_THROTTLED,
	SPSTAT_ADVANCED,
	NR_SPSTATS
};

static const char * const softpmu_stat_names[NR_SPSTATS] = {
	[SPSTAT_EVENT_INIT]		= "event_init",
	[SPSTAT_ADD]			= "add",
	[SPSTAT_DEL]			= "del",
	[SPSTAT_START]			= "start",
	[SPSTAT_STOP]			= "stop",
	[SPSTAT_READ]			= "read",
	[SPSTAT_PMU_ENABLE]		= "pmu_enable",
	[SPSTAT_PMU_DISABLE]		= "pmu_disable",
	[SPSTAT_PERIOD]			= "period",
	[SPSTAT_ADD_FAILED]		= "add_failed",
	[SPSTAT_INTERRUPTS]		= "interrupts",
	[SPSTAT_OVERFLOWS]		= "overflows",
	[SPSTAT_THROTTLED]		= "throttled",
	[SPSTAT_ADVANCED]		= "advanced",
};

struct softpmu_counter {
	struct perf_event *event;
	u64 value;
};

/* Everything but the statistics is accessed on its CPU, with interrupts off. */
struct softpmu_cpu {
	struct softpmu_counter counters[SOFTPMU_MAX_COUNTERS];
	unsigned int used[NR_CLASSES];
	bool disabled;
	u64 stats[NR_SPSTATS];
};

static DEFINE_PER_CPU(struct softpmu_cpu, softpmu_cpus);

static struct pmu softpmu;

static void softpmu_stat_inc(enum softpmu_stat stat)
{
	this_cpu_inc(softpmu_cpus.stats[stat]);
}

static u64 softpmu_stat_sum(enum softpmu_stat stat)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(per_cpu(softpmu_cpus.stats[stat], cpu));

	return sum;
}

/*
 * Counter allocation.  Any event may sit in any element of counters[], what
 * matters is only how many events of which class the CPU could place.
 */

static enum softpmu_class softpmu_class(struct perf_event *event)
{
	u64 select = event->hw.config & model->select_mask;

	if (!model->num_fixed)
		return CLASS_OTHER;
	if (select == model->selectors[PERF_COUNT_HW_INSTRUCTIONS])
		return CLASS_INSTRUCTIONS;
	if (select == model->selectors[PERF_COUNT_HW_CPU_CYCLES])
		return CLASS_CYCLES;
	if (select == model->selectors[PERF_COUNT_HW_REF_CPU_CYCLES])
		return CLASS_REF_CYCLES;
	return CLASS_OTHER;
}

static bool softpmu_fits(const unsigned int *used)
{
	unsigned int gp = used[CLASS_OTHER];

	if (used[CLASS_INSTRUCTIONS])
		gp += used[CLASS_INSTRUCTIONS] - 1;
	if (used[CLASS_CYCLES])
		gp += used[CLASS_CYCLES] - 1;

	return used[CLASS_REF_CYCLES] <= 1 && gp <= model->num_gp;
}

static bool softpmu_group_fits(struct perf_event *event)
{
	struct perf_event *leader = event->group_leader;
	unsigned int used[NR_CLASSES] = {};
	struct perf_event *sibling;

	used[softpmu_class(event)]++;

	if (leader != event) {
		if (leader->pmu == &softpmu)
			used[softpmu_class(leader)]++;
		for_each_sibling_event(sibling, leader) {
			if (sibling->pmu == &softpmu)
				used[softpmu_class(sibling)]++;
		}
	}

	return softpmu_fits(used);
}

/*
 * Counting.
 */

/* Move what the counter counted since the last time to where perf keeps it. */
static void softpmu_update(struct perf_event *event, const struct softpmu_counter *counter)
{
	struct hw_perf_event *hwc = &event->hw;
	u64 delta;

	lockdep_assert_irqs_disabled();

	delta = (counter->value - local64_read(&hwc->prev_count)) & SOFTPMU_MASK;
	local64_set(&hwc->prev_count, counter->value);
	local64_add(delta, &event->count);
	local64_sub(delta, &hwc->period_left);
}

/* Load the counter for what is left of the period; true if a new one began. */
static bool softpmu_set_period(struct perf_event *event, struct softpmu_counter *counter)
{
	struct hw_perf_event *hwc = &event->hw;
	s64 left = local64_read(&hwc->period_left);
	s64 period = hwc->sample_period;
	bool begun = left <= 0;

	if (begun) {
		left = left > -period ? left + period : period;
		local64_set(&hwc->period_left, left);
		hwc->last_period = period;
	}

	left = clamp_t(s64, left, READ_ONCE(exact) ? 1 : 2, SOFTPMU_MAX_LEFT);
	counter->value = SOFTPMU_WRAP - left;
	local64_set(&hwc->prev_count, counter->value);

	perf_event_update_userpage(event);

	return begun;
}

static void softpmu_stop_counter(struct perf_event *event, struct softpmu_counter *counter,
				 int flags)
{
	struct hw_perf_event *hwc = &event->hw;

	hwc->state |= PERF_HES_STOPPED;

	if ((flags & PERF_EF_UPDATE) && !(hwc->state & PERF_HES_UPTODATE)) {
		softpmu_update(event, counter);
		hwc->state |= PERF_HES_UPTODATE;
	}
}

/*
 * perf_event_overflow() is not for modules.  Its address comes from
 * softpmu_find_overflow(), and nothing can move a counter before it is known.
 */
static int softpmu_no_overflow(struct perf_event *event, struct perf_sample_data *data,
			       struct pt_regs *regs)
{
	return 0;
}

DEFINE_STATIC_CALL(softpmu_overflow, softpmu_no_overflow);

static void softpmu_interrupt(struct perf_event *event, struct softpmu_counter *counter,
			      struct pt_regs *regs)
{
	u64 last_period = event->hw.last_period;
	struct perf_sample_data data;

	softpmu_stat_inc(SPSTAT_INTERRUPTS);

	softpmu_update(event, counter);
	if (!softpmu_set_period(event, counter))
		return;

	softpmu_stat_inc(SPSTAT_OVERFLOWS);

	perf_sample_data_init(&data, 0, last_period);
	if (static_call(softpmu_overflow)(event, &data, regs)) {
		softpmu_stat_inc(SPSTAT_THROTTLED);
		softpmu_stop_counter(event, counter, 0);
	}
}

static void softpmu_count(struct softpmu_counter *counter, u64 nr, struct pt_regs *regs)
{
	struct perf_event *event = counter->event;

	softpmu_stat_inc(SPSTAT_ADVANCED);

	while (nr && !(event->hw.state & PERF_HES_STOPPED)) {
		u64 step = min(nr, SOFTPMU_WRAP - counter->value);

		nr -= step;
		counter->value = (counter->value + step) & SOFTPMU_MASK;
		if (!counter->value)
			softpmu_interrupt(event, counter, regs);
	}
}

struct softpmu_advance {
	u64 select;
	u64 nr;
	bool user;
	bool kernel;
};

static bool softpmu_counts(struct perf_event *event, const struct softpmu_advance *adv)
{
	if ((event->hw.config & model->select_mask) != adv->select)
		return false;
	if (event->hw.state & PERF_HES_STOPPED)
		return false;
	if (event->attr.exclude_guest)
		return false;

	return (adv->user && !event->attr.exclude_user) ||
	       (adv->kernel && !event->attr.exclude_kernel);
}

static void softpmu_advance_this_cpu(void *info)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);
	const struct softpmu_advance *adv = info;
	struct pt_regs *regs = get_irq_regs();
	struct pt_regs caller = {};
	unsigned int i;

	lockdep_assert_irqs_disabled();

	if (cpu->disabled)
		return;

	if (!regs) {
		perf_fetch_caller_regs(&caller);
		regs = &caller;
	}

	for (i = 0; i < ARRAY_SIZE(cpu->counters); i++) {
		struct softpmu_counter *counter = &cpu->counters[i];

		if (counter->event && softpmu_counts(counter->event, adv))
			softpmu_count(counter, adv->nr, regs);
	}
}

/*
 * What perf calls.
 */

static void softpmu_pmu_enable(struct pmu *pmu)
{
	softpmu_stat_inc(SPSTAT_PMU_ENABLE);
	this_cpu_write(softpmu_cpus.disabled, false);
}

static void softpmu_pmu_disable(struct pmu *pmu)
{
	softpmu_stat_inc(SPSTAT_PMU_DISABLE);
	this_cpu_write(softpmu_cpus.disabled, true);
}

static int softpmu_event_init(struct perf_event *event)
{
	struct hw_perf_event *hwc = &event->hw;

	if (event->attr.type != PERF_TYPE_RAW)
		return -ENOENT;

	softpmu_stat_inc(SPSTAT_EVENT_INIT);

	if (event->attr.precise_ip || has_branch_stack(event))
		return -EOPNOTSUPP;

	hwc->idx = -1;
	hwc->config = event->attr.config;

	/* A mere count interrupts too, so that it outlives the 48 bits. */
	if (!is_sampling_event(event)) {
		hwc->sample_period = SOFTPMU_MAX_LEFT;
		hwc->last_period = hwc->sample_period;
		local64_set(&hwc->period_left, hwc->sample_period);
	}

	return softpmu_group_fits(event) ? 0 : -EINVAL;
}

static void softpmu_start(struct perf_event *event, int flags)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);
	struct hw_perf_event *hwc = &event->hw;

	softpmu_stat_inc(SPSTAT_START);

	if (WARN_ON_ONCE(hwc->idx < 0 || !(hwc->state & PERF_HES_STOPPED)))
		return;

	if (flags & PERF_EF_RELOAD) {
		WARN_ON_ONCE(!(hwc->state & PERF_HES_UPTODATE));
		softpmu_set_period(event, &cpu->counters[hwc->idx]);
	}

	hwc->state = 0;
}

static void softpmu_stop(struct perf_event *event, int flags)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);

	softpmu_stat_inc(SPSTAT_STOP);

	if (WARN_ON_ONCE(event->hw.idx < 0))
		return;

	softpmu_stop_counter(event, &cpu->counters[event->hw.idx], flags);
}

static int softpmu_add(struct perf_event *event, int flags)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);
	enum softpmu_class class = softpmu_class(event);
	struct hw_perf_event *hwc = &event->hw;
	unsigned int i;

	softpmu_stat_inc(SPSTAT_ADD);

	for (i = 0; i < ARRAY_SIZE(cpu->counters); i++) {
		if (!cpu->counters[i].event)
			break;
	}

	cpu->used[class]++;
	if (i == ARRAY_SIZE(cpu->counters) || !softpmu_fits(cpu->used)) {
		cpu->used[class]--;
		softpmu_stat_inc(SPSTAT_ADD_FAILED);
		return -EAGAIN;
	}

	cpu->counters[i].event = event;
	hwc->idx = i;
	softpmu_set_period(event, &cpu->counters[i]);
	hwc->state = flags & PERF_EF_START ? 0 : PERF_HES_STOPPED | PERF_HES_UPTODATE;

	return 0;
}

static void softpmu_del(struct perf_event *event, int flags)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);
	struct hw_perf_event *hwc = &event->hw;
	struct softpmu_counter *counter;

	softpmu_stat_inc(SPSTAT_DEL);

	if (WARN_ON_ONCE(hwc->idx < 0))
		return;

	counter = &cpu->counters[hwc->idx];
	softpmu_stop_counter(event, counter, PERF_EF_UPDATE);

	cpu->used[softpmu_class(event)]--;
	counter->event = NULL;
	hwc->idx = -1;

	perf_event_update_userpage(event);
}

static void softpmu_read(struct perf_event *event)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);

	softpmu_stat_inc(SPSTAT_READ);

	if (event->hw.idx >= 0 && !(event->hw.state & PERF_HES_UPTODATE))
		softpmu_update(event, &cpu->counters[event->hw.idx]);
}

static int softpmu_check_period(struct perf_event *event, u64 period)
{
	softpmu_stat_inc(SPSTAT_PERIOD);

	return 0;
}

static struct pmu softpmu = {
	.module		= THIS_MODULE,
	.pmu_enable	= softpmu_pmu_enable,
	.pmu_disable	= softpmu_pmu_disable,
	.event_init	= softpmu_event_init,
	.add		= softpmu_add,
	.del		= softpmu_del,
	.start		= softpmu_start,
	.stop		= softpmu_stop,
	.read		= softpmu_read,
	.check_period	= softpmu_check_period,
};

/*
 * What KVM calls.
 */

static void softpmu_get_capability(struct x86_pmu_capability *cap)
{
	memset(cap, 0, sizeof(*cap));
	cap->version = model->version;
	cap->num_counters_gp = model->num_gp;
	cap->bit_width_gp = SOFTPMU_WIDTH;
	if (model->num_fixed) {
		cap->num_counters_fixed = model->num_fixed;
		cap->bit_width_fixed = SOFTPMU_WIDTH;
		/* Seven architectural events, and no bit says that one is missing. */
		cap->events_mask_len = 7;
	}
}

static u64 softpmu_get_selector(int hw_event)
{
	if (hw_event < 0 || hw_event >= PERF_COUNT_HW_MAX)
		return 0;

	return model->selectors[hw_event];
}

static struct klp_func softpmu_funcs[] = {
	{
		.old_name = "perf_get_x86_pmu_capability",
		.new_func = softpmu_get_capability,
	},
	{
		.old_name = "perf_get_hw_event_config",
		.new_func = softpmu_get_selector,
	},
	{ }
};

static struct klp_object softpmu_objects[] = {
	{ .funcs = softpmu_funcs },
	{ }
};

static struct klp_patch softpmu_patch = {
	.mod = THIS_MODULE,
	.objs = softpmu_objects,
};

/*
 * What user space sees.
 */

static int softpmu_stats_show(struct seq_file *m, void *unused)
{
	int i;

	for (i = 0; i < NR_SPSTATS; i++)
		seq_printf(m, "%s %llu\n", softpmu_stat_names[i], softpmu_stat_sum(i));

	return 0;
}

static int softpmu_stats_open(struct inode *inode, struct file *file)
{
	return single_open(file, softpmu_stats_show, NULL);
}

static void softpmu_stats_reset_this_cpu(void *unused)
{
	int i;

	for (i = 0; i < NR_SPSTATS; i++)
		this_cpu_write(softpmu_cpus.stats[i], 0);
}

static ssize_t softpmu_stats_write(struct file *file, const char __user *buf, size_t count,
				   loff_t *ppos)
{
	on_each_cpu(softpmu_stats_reset_this_cpu, NULL, 1);

	return count;
}

static const struct file_operations softpmu_stats_fops = {
	.owner		= THIS_MODULE,
	.open		= softpmu_stats_open,
	.read		= seq_read,
	.write		= softpmu_stats_write,
	.llseek		= seq_lseek,
	.release	= single_release,
};

static int softpmu_calls_get(void *data, u64 *val)
{
	*val = softpmu_stat_sum(SPSTAT_ADD) + softpmu_stat_sum(SPSTAT_DEL);

	return 0;
}

DEFINE_DEBUGFS_ATTRIBUTE(softpmu_calls_fops, softpmu_calls_get, NULL, "%llu\n");

struct softpmu_snapshot {
	struct {
		u64 config;
		u64 sample_period;
		u64 count;
		u64 left;
		bool exclude[4];
		int state;
		bool valid;
	} events[SOFTPMU_MAX_COUNTERS];
};

static void softpmu_snapshot_this_cpu(void *info)
{
	struct softpmu_cpu *cpu = this_cpu_ptr(&softpmu_cpus);
	struct softpmu_snapshot *snap = info;
	unsigned int i;

	for (i = 0; i < SOFTPMU_MAX_COUNTERS; i++) {
		const struct softpmu_counter *counter = &cpu->counters[i];
		struct perf_event *event = counter->event;
		u64 pending = 0;

		if (!event)
			continue;
		if (!(event->hw.state & PERF_HES_UPTODATE))
			pending = counter->value - local64_read(&event->hw.prev_count);
		snap->events[i].valid = true;
		snap->events[i].config = event->hw.config;
		snap->events[i].sample_period = event->hw.sample_period;
		snap->events[i].count = local64_read(&event->count) + (pending & SOFTPMU_MASK);
		snap->events[i].left = SOFTPMU_WRAP - counter->value;
		snap->events[i].exclude[0] = event->attr.exclude_host;
		snap->events[i].exclude[1] = event->attr.exclude_guest;
		snap->events[i].exclude[2] = event->attr.exclude_user;
		snap->events[i].exclude[3] = event->attr.exclude_kernel;
		snap->events[i].state = event->hw.state;
	}
}

static int softpmu_events_show(struct seq_file *m, void *unused)
{
	struct softpmu_snapshot snap;
	unsigned int i;
	int cpu;

	for_each_possible_cpu(cpu) {
		memset(&snap, 0, sizeof(snap));
		if (smp_call_function_single(cpu, softpmu_snapshot_this_cpu, &snap, 1))
			continue;
		for (i = 0; i < SOFTPMU_MAX_COUNTERS; i++) {
			if (!snap.events[i].valid)
				continue;
			seq_printf(m, "cpu %d config %#llx%s%s%s%s %s count %llu period %llu left %llu\n",
				   cpu, snap.events[i].config,
				   snap.events[i].exclude[0] ? " exclude_host" : "",
				   snap.events[i].exclude[1] ? " exclude_guest" : "",
				   snap.events[i].exclude[2] ? " exclude_user" : "",
				   snap.events[i].exclude[3] ? " exclude_kernel" : "",
				   snap.events[i].state & PERF_HES_STOPPED ? "stopped" : "running",
				   snap.events[i].count, snap.events[i].sample_period,
				   snap.events[i].left);
		}
	}

	return 0;
}
DEFINE_SHOW_ATTRIBUTE(softpmu_events);

/* The CPUs to advance on, when it is not the number of one. */
#define ADVANCE_HERE	-1
#define ADVANCE_ALL	-2

static int softpmu_parse_advance(char *line, struct softpmu_advance *adv, int *cpu)
{
	unsigned int nr_words = 0;
	char *word;
	u16 nr = 0;
	int ret;

	adv->user = true;
	adv->kernel = true;
	*cpu = ADVANCE_HERE;

	while ((word = strsep(&line, " \t\n"))) {
		if (!*word)
			continue;

		ret = 0;
		if (nr_words == 0) {
			ret = kstrtou64(word, 0, &adv->select);
		} else if (nr_words == 1) {
			ret = kstrtou64(word, 0, &adv->nr);
		} else if (!strcmp(word, "user")) {
			adv->kernel = false;
		} else if (!strcmp(word, "kernel")) {
			adv->user = false;
		} else if (!strcmp(word, "all")) {
			*cpu = ADVANCE_ALL;
		} else {
			ret = kstrtou16(word, 0, &nr);
			*cpu = nr;
		}
		if (ret)
			return ret;
		nr_words++;
	}

	if (nr_words < 2 || (adv->select & ~model->select_mask) ||
	    !(adv->user || adv->kernel))
		return -EINVAL;

	return 0;
}

static ssize_t softpmu_advance_write(struct file *file, const char __user *buf, size_t count,
				     loff_t *ppos)
{
	struct softpmu_advance adv;
	unsigned long flags;
	int cpu, ret = 0;
	char line[96];

	if (count >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, buf, count))
		return -EFAULT;
	line[count] = '\0';

	ret = softpmu_parse_advance(line, &adv, &cpu);
	if (ret)
		return ret;

	if (cpu == ADVANCE_HERE) {
		local_irq_save(flags);
		softpmu_advance_this_cpu(&adv);
		local_irq_restore(flags);
	} else if (cpu == ADVANCE_ALL) {
		on_each_cpu(softpmu_advance_this_cpu, &adv, 1);
	} else {
		ret = smp_call_function_single(cpu, softpmu_advance_this_cpu, &adv, 1);
	}

	return ret ?: count;
}

static const struct file_operations softpmu_advance_fops = {
	.owner	= THIS_MODULE,
	.open	= nonseekable_open,
	.write	= softpmu_advance_write,
};

static struct dentry *softpmu_dir;

static void __init softpmu_debugfs_init(bool can_advance)
{
	softpmu_dir = debugfs_create_dir("softpmu", NULL);
	debugfs_create_file("stats", 0600, softpmu_dir, NULL, &softpmu_stats_fops);
	debugfs_create_file("calls", 0400, softpmu_dir, NULL, &softpmu_calls_fops);
	debugfs_create_file("events", 0400, softpmu_dir, NULL, &softpmu_events_fops);
	if (can_advance)
		debugfs_create_file("advance", 0200, softpmu_dir, NULL, &softpmu_advance_fops);
}

/*
 * Is there a PMU that takes raw events?  perf has no way to ask for a PMU by its
 * type, and complains loudly about a second one of the same; so open an event.
 */
static bool __init softpmu_not_needed(void)
{
	struct perf_event_attr attr = {
		.type		= PERF_TYPE_RAW,
		.size		= sizeof(attr),
		.config		= model->selectors[PERF_COUNT_HW_INSTRUCTIONS],
		.disabled	= 1,
	};
	struct perf_event *event;

	event = perf_event_create_kernel_counter(&attr, cpumask_first(cpu_online_mask), NULL,
						 NULL, NULL);
	if (!IS_ERR(event))
		perf_event_release_kernel(event);

	return !IS_ERR(event) || PTR_ERR(event) != -ENOENT;
}

/*
 * A probe that is never armed finds the function.  Where functions start with
 * ENDBR it finds what follows that, which the direct call of a static call may
 * go to but an indirect one may not.
 */
static bool __init softpmu_find_overflow(void)
{
	int ret = -EOPNOTSUPP;

#ifdef CONFIG_KPROBES
	struct kprobe probe = {
		.symbol_name	= "perf_event_overflow",
		.flags		= KPROBE_FLAG_DISABLED,
	};

	ret = register_kprobe(&probe);
	if (!ret) {
		static_call_update(softpmu_overflow, (void *)probe.addr);
		unregister_kprobe(&probe);
	}
#endif
	if (ret)
		pr_warn("no kprobes (%d), so no overflows and no 'advance'\n", ret);

	return !ret;
}

/*
 * A task that was busy elsewhere may go on calling perf's own functions for a
 * while.  Return only when they are out of use, kvm.ko may be loaded next.
 */
static void __init softpmu_wait_for_patch(void)
{
	unsigned long timeout = jiffies + 60 * HZ;
	struct klp_func *func = softpmu_funcs;

	while (func->old_name) {
		if (!READ_ONCE(func->transition)) {
			func++;
			continue;
		}
		if (time_after(jiffies, timeout)) {
			pr_warn("live patch still in transition, KVM may find no PMU\n");
			break;
		}
		msleep(20);
	}
}

static int __init softpmu_init(void)
{
	int ret;

	switch (boot_cpu_data.x86_vendor) {
	case X86_VENDOR_INTEL:
		model = &softpmu_intel;
		break;
	case X86_VENDOR_AMD:
	case X86_VENDOR_HYGON:
		if (boot_cpu_has(X86_FEATURE_PERFCTR_CORE))
			softpmu_amd.num_gp = 6;
		model = &softpmu_amd;
		break;
	default:
		pr_err("neither an Intel nor an AMD CPU\n");
		return -ENODEV;
	}

	if (softpmu_not_needed()) {
		pr_err("this kernel has a PMU already\n");
		return -EBUSY;
	}

	ret = perf_pmu_register(&softpmu, "cpu", PERF_TYPE_RAW);
	if (ret) {
		pr_err("cannot register the PMU: %d\n", ret);
		return ret;
	}

	ret = klp_enable_patch(&softpmu_patch);
	if (ret) {
		pr_err("cannot enable the live patch: %d\n", ret);
		perf_pmu_unregister(&softpmu);
		return ret;
	}

	softpmu_wait_for_patch();
	softpmu_debugfs_init(softpmu_find_overflow());

	pr_info("%u general and %u fixed counters\n", model->num_gp, model->num_fixed);

	return 0;
}

static void __exit softpmu_exit(void)
{
	debugfs_remove_recursive(softpmu_dir);
	perf_pmu_unregister(&softpmu);
}

module_init(softpmu_init);
module_exit(softpmu_exit);

MODULE_LICENSE("GPL");
MODULE_INFO(livepatch, "Y");
MODULE_DESCRIPTION("CPU PMU in software, for KVM's virtual PMU on emulators without one");
