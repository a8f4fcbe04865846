// Switching between fibers: save the callee-saved registers on the stack and change the stack pointer. This file knows
// nothing of threads or warps.
#pragma once
#include <cstdint>
#include <cstring>

extern "C" void hotrow_switch_stack(void** save, void* load);

namespace cpu {

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl hotrow_switch_stack
.hidden hotrow_switch_stack
.type hotrow_switch_stack,@function
hotrow_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hotrow_switch_stack, .-hotrow_switch_stack
)");

// Prepares a stack whose first switch enters `entry`: six registers, the return address, and alignment as after a call.
inline void* first_frame(char* top, void (*entry)()) {
  void** slot = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  *--slot = nullptr;
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  return slot;
}

#elif defined(__aarch64__)
asm(R"(
.text
.p2align 2
.globl hotrow_switch_stack
.hidden hotrow_switch_stack
.type hotrow_switch_stack,%function
hotrow_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size hotrow_switch_stack, .-hotrow_switch_stack
)");

inline void* first_frame(char* top, void (*entry)()) {
  char* frame = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 160;
  std::memset(frame, 0, 160);
  reinterpret_cast<void**>(frame)[11] = reinterpret_cast<void*>(entry);  // x30, the link register
  return frame;
}

#else
#error "the kernel runner has no context switch for this processor"
#endif

}  // namespace cpu
