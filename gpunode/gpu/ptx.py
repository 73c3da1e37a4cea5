"""The vector-add kernel in PTX, written by hand so that no CUDA toolkit is needed.

PTX ISA 6.0 is what driver 384.81 (CUDA 9.0) understands and sm_30 is the oldest virtual architecture it
compiles for every later GPU, so each driver's own just-in-time compiler can make it fit the GPU at hand.
"""

ENTRY = "vector_add"

VECTOR_ADD = """.version 6.0
.target sm_30
.address_size 64

// out[i] = a[i] + b[i] for i < count; one thread per element
.visible .entry vector_add(
    .param .u64 a,
    .param .u64 b,
    .param .u64 out,
    .param .u32 count
)
{
    .reg .pred %beyond;
    .reg .b32 %index, %block, %threads, %thread, %count;
    .reg .b64 %a, %b, %out, %offset;
    .reg .f32 %x, %y, %sum;

    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    setp.ge.u32 %beyond, %index, %count;
    @%beyond bra done;

    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %out, [out];
    cvta.to.global.u64 %a, %a;
    cvta.to.global.u64 %b, %b;
    cvta.to.global.u64 %out, %out;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %a, %a, %offset;
    add.u64 %b, %b, %offset;
    add.u64 %out, %out, %offset;

    ld.global.f32 %x, [%a];
    ld.global.f32 %y, [%b];
    add.rn.f32 %sum, %x, %y;
    st.global.f32 [%out], %sum;

done:
    ret;
}
"""
