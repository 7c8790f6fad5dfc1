/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef PMUTEST_CODE_H
#define PMUTEST_CODE_H

#include <linux/types.h>

/* Pieces of code to be counted, what runs them, and a long one. */
extern u8 snippet_empty[], snippet_loop[], snippet_big_loop[], snippet_rep[],
	  snippet_rep_0[], snippet_not_taken[], snippet_call[], snippet_iret[],
	  snippet_cpuid[];

u32 run_snippet(const u8 *snippet);
void enable_disable(u32 msr, u64 value);
void run_sled(u32 msr, u64 value);
extern u8 sled[];

/* What the guest executes, up to the VMMCALL; its handler of events. */
extern u8 guest_empty[], guest_loop[], guest_sled[], guest_cpuid[], guest_int3[],
	  guest_read_cr3[], guest_read_cr0[], guest_lmsw[], guest_int80[], guest_wrmsr[],
	  guest_rdpmc[], guest_empty_end[];
extern u8 guest_handler[];

void vmrun(u64 vmcb);

#endif
