// SPDX-License-Identifier: GPL-2.0-only
/*
 * pmutest - what the emulated PMU and SVM of the bed amd-pmu do
 *
 * KVM's tests are only worth what the CPU below them is worth.  This module
 * checks the CPU alone: exact counts, who they are attributed to, interrupts at
 * the exact instruction, NMI virtualization, PMC virtualization, and the parts
 * of SVM that ci/qemu-pmu repairs.  It has a tiny guest of its own, which shares
 * the kernel's page tables, and doesn't need KVM.
 *
 * All tests run when the module is loaded, each prints a line to the kernel
 * log.  Loading fails if one of them fails.
 *
 * Nothing may be counted in between: perf must be idle, interrupts are off.
 */
#include <linux/init.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>

#include <asm/cpufeature.h>
#include <asm/cpuid/api.h>
#include <asm/debugreg.h>
#include <asm/desc.h>
#include <asm/msr.h>
#include <asm/nmi.h>
#include <asm/perf_event.h>
#include <asm/special_insns.h>
#include <asm/svm.h>

#include "code.h"

/* Which reading of AMD's rules the CPU was told to take, see QUESTIONS.md. */
static bool vmrun_host;
module_param(vmrun_host, bool, 0444);
static bool wrmsr_new;
module_param(wrmsr_new, bool, 0444);
static bool any_ctl;
module_param(any_ctl, bool, 0444);
static bool ignore_hg;
module_param(ignore_hg, bool, 0444);

#define CTL(n)		(MSR_F15H_PERF_CTL + 2 * (n))
#define CTR(n)		(MSR_F15H_PERF_CTR + 2 * (n))
#define NR_COUNTERS	6

#define CYCLES		0x76
#define INSNS		0xc0
#define BRANCHES	0xc2

#define USR		ARCH_PERFMON_EVENTSEL_USR
#define OS		ARCH_PERFMON_EVENTSEL_OS
#define EN		ARCH_PERFMON_EVENTSEL_ENABLE
#define INT		ARCH_PERFMON_EVENTSEL_INT
#define GUEST		AMD64_EVENTSEL_GUESTONLY
#define HOST		AMD64_EVENTSEL_HOSTONLY
#define COUNT		(USR | OS | EN)

#define CTR_MASK	GENMASK_ULL(47, 0)

/* PMC virtualization: what Linux doesn't know yet. */
#define CPUID_PMC_VIRT	BIT(8)
#define CPUID_VNMI	BIT(25)
#define PMC_VIRT_ENABLE	BIT_ULL(3)
#define VMCB_CTL(n)	(0x4e0 + 16 * (n))
#define VMCB_CTR(n)	(0x4e8 + 16 * (n))
#define VMCB_STATUS	0x5c8
#define VMCB_GLOBAL_CTL	0x5d0
#define EXIT_INVALID_PMC (-4ull)
#define EXIT_ERR	(-1ull)

static int nr_failed;

static void check(const char *name, u64 got, u64 want)
{
	if (got == want) {
		pr_info("pmutest: ok - %s\n", name);
	} else {
		pr_info("pmutest: not ok - %s: wanted 0x%llx, got 0x%llx\n", name, want, got);
		nr_failed++;
	}
}

/* --- the bare CPU --------------------------------------------------------- */

static void set_counter(int n, u64 ctl, u64 ctr)
{
	wrmsrq(CTL(n), 0);
	wrmsrq(CTR(n), ctr & CTR_MASK);
	wrmsrq(CTL(n), ctl);
}

static u64 count(u64 ctl, const u8 *snippet)
{
	u64 base;

	set_counter(0, ctl, 0);
	base = run_snippet(snippet_empty);
	return run_snippet(snippet) - base;
}

static void test_counts(void)
{
	check("loop: instructions", count(COUNT | INSNS, snippet_loop), 3001);
	check("loop: branches", count(COUNT | BRANCHES, snippet_loop), 1000);
	check("loop: cycles", count(COUNT | CYCLES, snippet_loop), 3001);
	check("long loop: instructions", count(COUNT | INSNS, snippet_big_loop), 9000001);
	check("long loop: branches", count(COUNT | BRANCHES, snippet_big_loop), 3000000);
	check("REP x 100: instructions", count(COUNT | INSNS, snippet_rep), 3);
	check("REP x 100: branches", count(COUNT | BRANCHES, snippet_rep), 0);
	check("REP x 0: instructions", count(COUNT | INSNS, snippet_rep_0), 2);
	check("Jcc: branches", count(COUNT | BRANCHES, snippet_not_taken), 2);
	check("CALL, RET, JMP: branches", count(COUNT | BRANCHES, snippet_call), 3);
	check("IRET: instructions", count(COUNT | INSNS, snippet_iret), 10);
	check("IRET: branches", count(COUNT | BRANCHES, snippet_iret), 1);
	check("CPUID: instructions", count(COUNT | INSNS, snippet_cpuid), 4);
	check("user only", count(USR | EN | INSNS, snippet_loop), 0);
	check("kernel only", count(OS | EN | INSNS, snippet_loop), 3001);
	check("disabled", count(USR | OS | INSNS, snippet_loop), 0);
	check("unknown event", count(COUNT | 0x64, snippet_loop), 0);
}

static void test_wrmsr(void)
{
	u64 value;

	set_counter(0, 0, 0);
	enable_disable(CTL(0), COUNT | INSNS);
	rdmsrq(CTR(0), value);
	check("WRMSR: the one that disables counts, the one that enables doesn't", value, 3);
}

static void test_registers(void)
{
	u64 value;

	wrmsrq(CTL(2), 0);
	wrmsrq(CTR(2), 0x123456789abcull);
	rdmsrq(MSR_K7_PERFCTR2, value);
	check("legacy alias of a counter", value, 0x123456789abcull);
	wrmsrq(MSR_K7_EVNTSEL2, INSNS);
	rdmsrq(CTL(2), value);
	check("legacy alias of a control register", value, INSNS);
	wrmsrq(CTR(2), ~0ull);
	rdmsrq(CTR(2), value);
	check("counters have 48 bits", value, CTR_MASK);
	set_counter(2, 0, 0);
}

/* --- interrupts ----------------------------------------------------------- */

static u64 nmi_ip;
static u32 nr_nmis;
static bool nmi_expected;

static int nmi_handler(unsigned int cmd, struct pt_regs *regs)
{
	if (!READ_ONCE(nmi_expected))
		return NMI_DONE;
	wrmsrq(CTL(0), 0);
	nmi_ip = regs->ip;
	nr_nmis++;
	return NMI_HANDLED;
}

static void overflow_sled(u64 ctl, u64 preset)
{
	set_counter(0, 0, preset);
	nr_nmis = 0;
	nmi_ip = 0;
	WRITE_ONCE(nmi_expected, true);
	run_sled(CTL(0), ctl);
	wrmsrq(CTL(0), 0);
	WRITE_ONCE(nmi_expected, false);
}

static void test_overflow(bool v2)
{
	static const int distances[] = { 1, 2, 3, 17, 100, 999, 1000, 1999 };
	char name[64];
	u64 value;
	int i;

	for (i = 0; i < ARRAY_SIZE(distances); i++) {
		if (v2)
			wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR, ~0ull);
		overflow_sled(COUNT | INT | INSNS, -distances[i]);
		snprintf(name, sizeof(name), "overflow after %d: one interrupt", distances[i]);
		check(name, nr_nmis, 1);
		snprintf(name, sizeof(name), "overflow after %d: where", distances[i]);
		check(name, nmi_ip - (u64)sled, distances[i] + wrmsr_new * -1);
	}
	if (v2) {
		rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS, value);
		check("overflow: status", value, 1);
		wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR, ~0ull);
		rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS, value);
		check("overflow: status cleared", value, 0);
	}
	overflow_sled(COUNT | INSNS, -100);
	check("overflow, not asked for: no interrupt", nr_nmis, 0);
}

/* --- a guest -------------------------------------------------------------- */

/* Written by the guest. */
u64 guest_event_ip;
u32 guest_nr_events;

static struct vmcb *vmcb;
static void *guest_stack, *guest_idt, *hsave, *msrpm;
#define MSRPM_ORDER	1

static u64 *vmcb_u64(unsigned int offset)
{
	return (void *)vmcb + offset;
}

static void set_intercept(unsigned int bit)
{
	vmcb->control.intercepts[bit / 32] |= BIT(bit % 32);
}

static void clear_intercept(unsigned int bit)
{
	vmcb->control.intercepts[bit / 32] &= ~BIT(bit % 32);
}

static void set_seg(struct vmcb_seg *seg, u16 selector, u16 attrib)
{
	seg->selector = selector;
	seg->attrib = attrib;
	seg->limit = ~0u;
	seg->base = 0;
}

static void init_guest(void)
{
	struct desc_ptr gdt;
	gate_desc gate;
	int vector;

	memset(vmcb, 0, PAGE_SIZE);
	set_intercept(INTERCEPT_VMRUN);
	set_intercept(INTERCEPT_VMMCALL);
	set_intercept(INTERCEPT_NMI);
	set_intercept(INTERCEPT_SHUTDOWN);
	vmcb->control.asid = 1;
	vmcb->control.msrpm_base_pa = virt_to_phys(msrpm);
	set_seg(&vmcb->save.cs, __KERNEL_CS, 0x29b);
	set_seg(&vmcb->save.ss, __KERNEL_DS, 0xc93);
	set_seg(&vmcb->save.ds, __KERNEL_DS, 0xc93);
	set_seg(&vmcb->save.es, __KERNEL_DS, 0xc93);
	native_store_gdt(&gdt);
	vmcb->save.gdtr.base = gdt.address;
	vmcb->save.gdtr.limit = gdt.size;
	for (vector = 0; vector < 256; vector++) {
		pack_gate(&gate, GATE_INTERRUPT, (unsigned long)guest_handler, 0, 0, __KERNEL_CS);
		write_idt_entry(guest_idt, vector, &gate);
	}
	vmcb->save.idtr.base = (u64)guest_idt;
	vmcb->save.idtr.limit = PAGE_SIZE - 1;
	rdmsrq(MSR_EFER, vmcb->save.efer);
	vmcb->save.cr0 = read_cr0();
	vmcb->save.cr3 = __native_read_cr3();
	vmcb->save.cr4 = __read_cr4();
	vmcb->save.dr6 = DR6_RESERVED;
	vmcb->save.dr7 = DR7_FIXED_1;
}

/* Run the guest until it exits; return the exit code. */
static u64 run_guest(const u8 *code)
{
	vmcb->save.rip = (u64)code;
	vmcb->save.rsp = (u64)guest_stack + PAGE_SIZE - 16;
	vmcb->save.rflags = X86_EFLAGS_FIXED;
	vmcb->control.exit_code = 0x5a5a;
	guest_nr_events = 0;
	guest_event_ip = 0;

	vmrun(virt_to_phys(vmcb));
	return vmcb->control.exit_code;
}

static void check_guest(const char *name, const u8 *code)
{
	char text[80];

	snprintf(text, sizeof(text), "%s: the guest runs to its end", name);
	check(text, run_guest(code), SVM_EXIT_VMMCALL);
}

static u64 count_guest(u64 ctl, const u8 *code)
{
	u64 value;

	set_counter(0, ctl, 0);
	run_guest(code);
	rdmsrq(CTR(0), value);
	wrmsrq(CTL(0), 0);
	return value;
}

static void test_svm(bool has_nrips)
{
	u64 value, rip;

	init_guest();
	check_guest("empty guest", guest_empty);
	check("RIP at the exit", vmcb->save.rip, (u64)guest_empty_end);
	if (has_nrips) {
		check("next RIP, VMMCALL", vmcb->control.next_rip, (u64)guest_empty_end + 3);
		set_intercept(INTERCEPT_CPUID);
		check("CPUID intercept", run_guest(guest_cpuid), SVM_EXIT_CPUID);
		check("next RIP, CPUID", vmcb->control.next_rip, (u64)guest_cpuid + 3);
		clear_intercept(INTERCEPT_CPUID);
		vmcb->control.int_ctl = 0;
	}

	init_guest();
	check_guest("INT3", guest_int3);
	check("INT3: handled by the guest", guest_nr_events, 1);
	check("INT3: return address", guest_event_ip, (u64)guest_int3 + 1);
	set_intercept(INTERCEPT_EXCEPTION_OFFSET + BP_VECTOR);
	check("INT3: intercept of #BP", run_guest(guest_int3), SVM_EXIT_EXCP_BASE + BP_VECTOR);
	check("INT3: RIP", vmcb->save.rip, (u64)guest_int3);
	if (has_nrips)
		check("INT3: next RIP", vmcb->control.next_rip, (u64)guest_int3 + 1);

	init_guest();
	check_guest("INT n", guest_int80);
	check("INT n: handled by the guest", guest_nr_events, 1);
	set_intercept(INTERCEPT_INTn);
	check("INT n: intercept", run_guest(guest_int80), SVM_EXIT_SWINT);
	check_guest("INT3 is no INT n", guest_int3);
	if (has_nrips) {
		init_guest();
		vmcb->control.event_inj = 0x80 | SVM_EVTINJ_VALID | SVM_EVTINJ_TYPE_SOFT;
		vmcb->control.next_rip = (u64)guest_empty_end;
		check_guest("injected INT n", guest_int80);
		check("injected INT n: return address", guest_event_ip, (u64)guest_empty_end);
		vmcb->control.event_inj = BP_VECTOR | SVM_EVTINJ_VALID | SVM_EVTINJ_TYPE_EXEPT;
		vmcb->control.next_rip = (u64)guest_empty_end;
		check_guest("injected INT3", guest_int3);
		check("injected INT3: return address", guest_event_ip, (u64)guest_empty_end);
	}

	init_guest();
	set_intercept(INTERCEPT_CR3_READ);
	check("CR3 read intercept", run_guest(guest_read_cr3), SVM_EXIT_READ_CR0 + 3);
	check_guest("CR0 read is no CR3 read", guest_read_cr0);
	init_guest();
	set_intercept(INTERCEPT_CR0_READ);
	check_guest("CR3 read is no CR0 read", guest_read_cr3);
	init_guest();
	set_intercept(INTERCEPT_SELECTIVE_CR0);
	check("LMSW: selective intercept", run_guest(guest_lmsw), SVM_EXIT_CR0_SEL_WRITE);

	/* No ASID: VMRUN fails, and nothing is written but the exit code. */
	init_guest();
	vmcb->control.asid = 0;
	vmcb->control.int_ctl = V_INTR_MASKING_MASK;
	rip = (u64)guest_empty;
	check("failing VMRUN", run_guest(guest_empty), EXIT_ERR);
	check("failing VMRUN: RIP", vmcb->save.rip, rip);
	check("failing VMRUN: int_ctl", vmcb->control.int_ctl, V_INTR_MASKING_MASK);

	rdmsrq(MSR_IA32_SYSENTER_ESP, rip);
	wrmsrq(MSR_IA32_SYSENTER_ESP, 0x123456789000ull);
	rdmsrq(MSR_IA32_SYSENTER_ESP, value);
	check("SYSENTER_ESP has 32 bits", value, 0x56789000);
	wrmsrq(MSR_IA32_SYSENTER_ESP, rip);
}

static void test_attribution(void)
{
	u64 vmrun = !vmrun_host, host, efer;

	init_guest();
	check("guest: instructions, empty guest",
	      count_guest(COUNT | GUEST | INSNS, guest_empty), vmrun);
	check("guest: instructions, loop",
	      count_guest(COUNT | GUEST | INSNS, guest_loop), 3001 + vmrun);
	check("guest: branches, loop",
	      count_guest(COUNT | GUEST | BRANCHES, guest_loop), 1000 + vmrun);
	check("guest: at CPL 3 only", count_guest(USR | EN | GUEST | INSNS, guest_loop), 0);
	host = count_guest(COUNT | HOST | INSNS, guest_empty);
	check("host: the guest doesn't matter",
	      count_guest(COUNT | HOST | INSNS, guest_loop), host);
	check("both bits: host and guest", count_guest(COUNT | HOST | GUEST | INSNS, guest_loop),
	      host + 3001 + vmrun);
	check("no bit: host and guest",
	      count_guest(COUNT | INSNS, guest_loop), host + 3001 + vmrun);

	rdmsrq(MSR_EFER, efer);
	wrmsrq(MSR_EFER, efer & ~EFER_SVME);
	check("no SVME: host only doesn't count", count(COUNT | HOST | INSNS, snippet_loop), 0);
	check("no SVME: no bit counts", count(COUNT | INSNS, snippet_loop), 3001);
	wrmsrq(MSR_EFER, efer);
	check("SVME: host only counts", count(COUNT | HOST | INSNS, snippet_loop), 3001);
	check("SVME: guest only doesn't", count(COUNT | GUEST | INSNS, snippet_loop), 0);

	/* The overflow is the host's, who intercepts the NMI. */
	set_counter(0, COUNT | GUEST | INT | INSNS, -(10 + vmrun));
	nr_nmis = 0;
	WRITE_ONCE(nmi_expected, true);
	check("overflow in the guest: exit", run_guest(guest_sled), SVM_EXIT_NMI);
	WRITE_ONCE(nmi_expected, false);
	check("overflow in the guest: where", vmcb->save.rip - (u64)guest_sled, 10);
	check("overflow in the guest: the host's NMI", nr_nmis, 1);
	wrmsrq(CTL(0), 0);
}

#define V_NMI (V_NMI_PENDING_MASK | V_NMI_BLOCKING_MASK)

static void test_vnmi(void)
{
	init_guest();
	vmcb->control.int_ctl = V_NMI_ENABLE_MASK | V_NMI_PENDING_MASK;
	check_guest("virtual NMI", guest_sled);
	check("virtual NMI: delivered once", guest_nr_events, 1);
	check("virtual NMI: before the first instruction", guest_event_ip, (u64)guest_sled);
	check("virtual NMI: neither pending nor blocked after IRET",
	      vmcb->control.int_ctl & V_NMI, 0);

	vmcb->control.int_ctl = V_NMI_ENABLE_MASK | V_NMI;
	check_guest("blocked virtual NMI", guest_sled);
	check("blocked virtual NMI: not delivered", guest_nr_events, 0);
	check("blocked virtual NMI: stays", vmcb->control.int_ctl & V_NMI, V_NMI);

	/* Injected while no NMI is pending: blocks until IRET. */
	vmcb->control.int_ctl = V_NMI_ENABLE_MASK;
	vmcb->control.event_inj = NMI_VECTOR | SVM_EVTINJ_VALID | SVM_EVTINJ_TYPE_NMI;
	check_guest("injected NMI", guest_sled);
	check("injected NMI: delivered once", guest_nr_events, 1);

	clear_intercept(INTERCEPT_NMI);
	check("VNMI without the intercept of NMIs", run_guest(guest_empty), EXIT_ERR);
}

static void set_guest_counter(int n, u64 ctl, u64 ctr)
{
	*vmcb_u64(VMCB_CTL(n)) = ctl;
	*vmcb_u64(VMCB_CTR(n)) = ctr & CTR_MASK;
}

static void test_pmc_virt(void)
{
	u64 vmrun = !vmrun_host, value, i, bits;

	init_guest();
	vmcb->control.misc_ctl2 = PMC_VIRT_ENABLE;
	vmcb->control.int_ctl = V_NMI_ENABLE_MASK;
	*vmcb_u64(VMCB_GLOBAL_CTL) = 0x3f;
	set_guest_counter(0, COUNT | INSNS, 0);

	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 1);
	check("PMC virt: VMRUN with GLOBAL_CTL set", run_guest(guest_loop),
	      any_ctl ? SVM_EXIT_VMMCALL : EXIT_INVALID_PMC);
	if (!any_ctl) {
		check("PMC virt: refused, RIP", vmcb->save.rip, (u64)guest_loop);
		check("PMC virt: refused, guest's counter", *vmcb_u64(VMCB_CTR(0)), 0);
		rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, value);
		check("PMC virt: refused, host's GLOBAL_CTL", value, 1);
	}

	/* Load, save, and what is left for the host. */
	for (i = 0; i < NR_COUNTERS; i++) {
		set_counter(i, 0, 0x1000 + i);
		set_guest_counter(i, i < 3 ? COUNT | (i == 1 ? BRANCHES : INSNS) : 0, 0x2000 * i);
	}
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR, ~0ull);
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_SET, 0x21);
	*vmcb_u64(VMCB_STATUS) = 0x10;
	*vmcb_u64(VMCB_GLOBAL_CTL) = 0x03;
	check_guest("PMC virt", guest_loop);
	check("PMC virt: guest's instructions", *vmcb_u64(VMCB_CTR(0)), 3001 + vmrun);
	check("PMC virt: guest's branches", *vmcb_u64(VMCB_CTR(1)), 0x2000 + 1000 + vmrun);
	check("PMC virt: disabled in the guest's GLOBAL_CTL", *vmcb_u64(VMCB_CTR(2)), 0x4000);
	check("PMC virt: unused counter is kept", *vmcb_u64(VMCB_CTR(5)), 0xa000);
	check("PMC virt: guest's GLOBAL_CTL is kept", *vmcb_u64(VMCB_GLOBAL_CTL), 0x03);
	check("PMC virt: guest's status is kept", *vmcb_u64(VMCB_STATUS), 0x10);
	for (i = 0, bits = 0; i < NR_COUNTERS; i++) {
		rdmsrq(CTL(i), value);
		bits |= value;
		rdmsrq(CTR(i), value);
		bits |= value;
	}
	check("PMC virt: host's counters are reset", bits, 0);
	rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, value);
	check("PMC virt: host's GLOBAL_CTL has its reset value", value, 0x3f);
	rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS, value);
	check("PMC virt: host's status is kept", value, 0x21);
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_STATUS_CLR, ~0ull);

	/* Overflow: a virtual NMI for the guest, nothing for the host. */
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	nr_nmis = 0;
	WRITE_ONCE(nmi_expected, true);
	*vmcb_u64(VMCB_STATUS) = 0;
	set_guest_counter(0, COUNT | INT | INSNS, -(10 + vmrun));
	check_guest("PMC virt, overflow", guest_sled);
	check("PMC virt, overflow: one NMI for the guest", guest_nr_events, 1);
	check("PMC virt, overflow: where", guest_event_ip - (u64)guest_sled, 10);
	check("PMC virt, overflow: status", *vmcb_u64(VMCB_STATUS), 1);
	check("PMC virt, overflow: no longer pending", vmcb->control.int_ctl & V_NMI, 0);

	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	*vmcb_u64(VMCB_STATUS) = 0;
	vmcb->control.int_ctl = V_NMI_ENABLE_MASK | V_NMI_BLOCKING_MASK;
	set_guest_counter(0, COUNT | INT | INSNS, -(10 + vmrun));
	check_guest("PMC virt, overflow while blocked", guest_sled);
	check("PMC virt, overflow while blocked: no NMI", guest_nr_events, 0);
	check("PMC virt, overflow while blocked: pending", vmcb->control.int_ctl & V_NMI, V_NMI);

	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	*vmcb_u64(VMCB_STATUS) = 0;
	vmcb->control.int_ctl = 0;
	set_guest_counter(0, COUNT | INT | INSNS, -(10 + vmrun));
	check_guest("PMC virt, overflow without VNMI", guest_sled);
	check("PMC virt, overflow without VNMI: no NMI", guest_nr_events, 0);
	check("PMC virt, overflow without VNMI: status", *vmcb_u64(VMCB_STATUS), 1);
	WRITE_ONCE(nmi_expected, false);
	check("PMC virt, overflows: no NMI for the host", nr_nmis, 0);

	/* Guest only and host only. */
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	set_guest_counter(0, COUNT | GUEST | INSNS, 0);
	set_guest_counter(1, COUNT | HOST | INSNS, 0);
	check_guest("PMC virt, guest only", guest_loop);
	check("PMC virt: guest only counts", *vmcb_u64(VMCB_CTR(0)), 3001 + vmrun);
	check("PMC virt: host only", *vmcb_u64(VMCB_CTR(1)), ignore_hg ? 3001 + vmrun : 0);

	/* Intercepts are still in force. */
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	memset(msrpm, 0xff, PAGE_SIZE << MSRPM_ORDER);
	set_intercept(INTERCEPT_MSR_PROT);
	check("PMC virt: WRMSR is intercepted", run_guest(guest_wrmsr), SVM_EXIT_MSR);
	clear_intercept(INTERCEPT_MSR_PROT);
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	set_guest_counter(0, COUNT | INSNS, 0);
	check_guest("PMC virt: WRMSR", guest_wrmsr);
	check("PMC virt: WRMSR writes the guest's register", *vmcb_u64(VMCB_CTL(0)), 0);
	check("PMC virt: WRMSR counts", *vmcb_u64(VMCB_CTR(0)), (wrmsr_new ? 3 : 4) + vmrun);
	wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0);
	set_intercept(INTERCEPT_RDPMC);
	check("PMC virt: RDPMC is intercepted", run_guest(guest_rdpmc), SVM_EXIT_RDPMC);
}

static void run_tests(void)
{
	u32 edx = cpuid_edx(0x8000000a);
	bool v2 = boot_cpu_has(X86_FEATURE_PERFMON_V2);
	u64 efer, pa, global_ctl = 0;
	unsigned long flags;

	local_irq_save(flags);
	rdmsrq(MSR_EFER, efer);
	rdmsrq(MSR_VM_HSAVE_PA, pa);
	wrmsrq(MSR_EFER, efer | EFER_SVME);
	wrmsrq(MSR_VM_HSAVE_PA, virt_to_phys(hsave));
	if (v2) {
		rdmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, global_ctl);
		wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, 0x3f);
	}

	test_registers();
	test_counts();
	test_wrmsr();
	test_overflow(v2);
	test_svm(boot_cpu_has(X86_FEATURE_NRIPS));
	test_attribution();
	if (edx & CPUID_VNMI)
		test_vnmi();
	if (edx & CPUID_PMC_VIRT)
		test_pmc_virt();

	set_counter(0, 0, 0);
	if (v2)
		wrmsrq(MSR_AMD64_PERF_CNTR_GLOBAL_CTL, global_ctl);
	wrmsrq(MSR_VM_HSAVE_PA, pa);
	wrmsrq(MSR_EFER, efer);
	local_irq_restore(flags);
}

static int __init pmutest_init(void)
{
	int r = -ENOMEM;

	if (!boot_cpu_has(X86_FEATURE_SVM) || !boot_cpu_has(X86_FEATURE_PERFCTR_CORE))
		return -ENODEV;

	vmcb = (void *)__get_free_page(GFP_KERNEL | __GFP_ZERO);
	hsave = (void *)__get_free_page(GFP_KERNEL | __GFP_ZERO);
	guest_stack = (void *)__get_free_page(GFP_KERNEL | __GFP_ZERO);
	guest_idt = (void *)__get_free_page(GFP_KERNEL | __GFP_ZERO);
	msrpm = (void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO, MSRPM_ORDER);
	if (!vmcb || !hsave || !guest_stack || !guest_idt || !msrpm)
		goto out;

	r = register_nmi_handler(NMI_LOCAL, nmi_handler, NMI_FLAG_FIRST, "pmutest");
	if (r)
		goto out;
	run_tests();
	unregister_nmi_handler(NMI_LOCAL, "pmutest");

	pr_info("pmutest: %d failed\n", nr_failed);
	r = nr_failed ? -EIO : 0;
out:
	free_pages((unsigned long)msrpm, MSRPM_ORDER);
	free_page((unsigned long)guest_idt);
	free_page((unsigned long)guest_stack);
	free_page((unsigned long)hsave);
	free_page((unsigned long)vmcb);
	return r;
}
module_init(pmutest_init);

static void __exit pmutest_exit(void)
{
}
module_exit(pmutest_exit);

MODULE_DESCRIPTION("Tests of an emulated AMD PMU and of its virtualization");
MODULE_LICENSE("GPL");
