/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What pmutest has the emulated CPU count.  Plain RET and indirect calls: this
 * code runs in an emulator only, and objtool doesn't look at it.
 */
#include <linux/linkage.h>
#include <linux/objtool.h>

#include <asm/nospec-branch.h>

	.text

.macro PLAIN_RET
	ANNOTATE_UNRET_SAFE
	ret
.endm

/* u32 run_snippet(const u8 *snippet): what counter 0 counts */
	.globl run_snippet
run_snippet:
	push	%rbx
	xor	%ecx, %ecx
	rdpmc
	mov	%eax, %ebx
	ANNOTATE_RETPOLINE_SAFE
	call	*%rdi
	xor	%ecx, %ecx
	rdpmc
	sub	%ebx, %eax
	pop	%rbx
	PLAIN_RET

/* void enable_disable(u32 msr, u64 value): enabling and disabling WRMSR */
	.globl enable_disable
enable_disable:
	mov	%edi, %ecx
	mov	%esi, %eax
	mov	%rsi, %rdx
	shr	$32, %rdx
	wrmsr
	xor	%eax, %eax
	xor	%edx, %edx
	wrmsr
	PLAIN_RET

/* void run_sled(u32 msr, u64 value): WRMSR, then instructions one byte long */
	.globl run_sled, sled
run_sled:
	mov	%edi, %ecx
	mov	%esi, %eax
	mov	%rsi, %rdx
	shr	$32, %rdx
	wrmsr
sled:
	ANNOTATE_NOENDBR
	.rept	2000
	nop
	.endr
	PLAIN_RET

/* void vmrun(u64 vmcb): the guest may use any register */
	.globl vmrun
vmrun:
	push	%rbx
	push	%rbp
	push	%r12
	push	%r13
	push	%r14
	push	%r15
	mov	%rdi, %rax
	clgi
	vmrun	%rax
	stgi
	pop	%r15
	pop	%r14
	pop	%r13
	pop	%r12
	pop	%rbp
	pop	%rbx
	PLAIN_RET

/* The guest's handler of all events. */
	.globl guest_handler
guest_handler:
	ANNOTATE_NOENDBR
	push	%rax
	mov	8(%rsp), %rax
	mov	%rax, guest_event_ip(%rip)
	incl	guest_nr_events(%rip)
	pop	%rax
	iretq

/* Snippets get their own address in RDI, and may clobber what functions may. */
	.globl	snippet_empty
	.type	snippet_empty, @function
snippet_empty:
	ANNOTATE_NOENDBR
	PLAIN_RET
	.size	snippet_empty, . - snippet_empty

	.globl	snippet_loop
snippet_loop:
	ANNOTATE_NOENDBR
	mov	$1000, %ecx
1:
	nop
	dec	%ecx
	jnz	1b
	PLAIN_RET

	.globl	snippet_big_loop
snippet_big_loop:
	ANNOTATE_NOENDBR
	mov	$3000000, %ecx
1:
	nop
	dec	%ecx
	jnz	1b
	PLAIN_RET

	.globl	snippet_rep
snippet_rep:
	ANNOTATE_NOENDBR
	mov	%rdi, %rsi
	mov	$100, %ecx
	rep	lodsb
	PLAIN_RET

	.globl	snippet_rep_0
snippet_rep_0:
	ANNOTATE_NOENDBR
	xor	%ecx, %ecx
	rep	lodsb
	PLAIN_RET

	.globl	snippet_not_taken
snippet_not_taken:
	ANNOTATE_NOENDBR
	test	%eax, %eax
	jo	1f
1:
	jno	1f
1:
	PLAIN_RET

	.globl	snippet_call
snippet_call:
	ANNOTATE_NOENDBR
	call	snippet_empty
	jmp	1f
1:
	PLAIN_RET

	.globl	snippet_iret
snippet_iret:
	ANNOTATE_NOENDBR
	mov	%rsp, %rcx
	mov	%ss, %eax
	push	%rax
	push	%rcx
	pushf
	mov	%cs, %eax
	push	%rax
	lea	1f(%rip), %rax
	push	%rax
	iretq
1:
	ANNOTATE_NOENDBR
	PLAIN_RET

	.globl	snippet_cpuid
snippet_cpuid:
	ANNOTATE_NOENDBR
	push	%rbx
	xor	%eax, %eax
	cpuid
	pop	%rbx
	PLAIN_RET

/* What the guest executes, up to the VMMCALL. */
	.globl	guest_empty, guest_empty_end
guest_empty:
	ANNOTATE_NOENDBR
guest_empty_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_loop, guest_loop_end
guest_loop:
	ANNOTATE_NOENDBR
	mov	$1000, %ecx
1:
	nop
	dec	%ecx
	jnz	1b
guest_loop_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_sled, guest_sled_end
guest_sled:
	ANNOTATE_NOENDBR
	nop
	.rept	100
	nop
	.endr
guest_sled_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_cpuid, guest_cpuid_end
guest_cpuid:
	ANNOTATE_NOENDBR
	nop
	cpuid
guest_cpuid_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_int3, guest_int3_end
guest_int3:
	ANNOTATE_NOENDBR
	int3
guest_int3_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_read_cr3, guest_read_cr3_end
guest_read_cr3:
	ANNOTATE_NOENDBR
	mov	%cr3, %rax
guest_read_cr3_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_read_cr0, guest_read_cr0_end
guest_read_cr0:
	ANNOTATE_NOENDBR
	mov	%cr0, %rax
guest_read_cr0_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_lmsw, guest_lmsw_end
guest_lmsw:
	ANNOTATE_NOENDBR
	smsw	%ax
	lmsw	%ax
guest_lmsw_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_int80, guest_int80_end
guest_int80:
	ANNOTATE_NOENDBR
	int	$0x80
guest_int80_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_wrmsr, guest_wrmsr_end
guest_wrmsr:
	ANNOTATE_NOENDBR
	mov	$0xc0010200, %ecx
	xor	%eax, %eax
	xor	%edx, %edx
	wrmsr
guest_wrmsr_end:
	ANNOTATE_NOENDBR
	vmmcall

	.globl	guest_rdpmc, guest_rdpmc_end
guest_rdpmc:
	ANNOTATE_NOENDBR
	xor	%ecx, %ecx
	rdpmc
guest_rdpmc_end:
	ANNOTATE_NOENDBR
	vmmcall
