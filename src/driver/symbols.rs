//! The CUDA driver's functions, found at run time.
//!
//! `cust` calls `cuInit` and its kin by name, and the linker must find them somewhere, also on a machine without a driver.
//! Here each name is a small jump through a slot. The first call opens `libcuda.so.1` and puts the real function's address
//! into the slot; from then on a call costs one indirect jump. Where there is no driver, every function answers
//! `CUDA_ERROR_STUB_LIBRARY`, and [`driver_available`] says why.
//!
//! The names are weak and hidden: a program that links a driver of its own, or XLA's own stand-ins, wins over these, and no
//! library that contains them shows them to others. Every function of `cust`'s bindings has a jump, used or not; those that
//! are not used are dropped with their sections.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// `CUDA_ERROR_STUB_LIBRARY`: what a call answers when there is no driver.
pub(super) const STUB_LIBRARY: c_int = 34;

/// The name by which every driver installation is found.
const DRIVER: &CStr = c"libcuda.so.1";

/// The opened driver's handle, or the reason that it did not open.
fn driver() -> &'static std::result::Result<usize, String> {
    static DRIVER_HANDLE: OnceLock<std::result::Result<usize, String>> = OnceLock::new();
    DRIVER_HANDLE.get_or_init(|| {
        // SAFETY: dlopen with a constant name; the driver is never closed, so its functions stay valid.
        let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(handle as usize);
        }
        // SAFETY: dlerror answers null or a text of this thread's last failure.
        let reason = unsafe { libc::dlerror() };
        if reason.is_null() {
            return Err("dlopen gave no reason".to_owned());
        }
        // SAFETY: not null, and valid until this thread's next dl call.
        Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned())
    })
}

/// Whether there is a CUDA driver to call.
///
/// # Errors
/// `FAILED_PRECONDITION` with the loader's reason.
pub fn driver_available() -> Result<()> {
    match driver() {
        Ok(_) => Ok(()),
        Err(reason) => Err(Error::precondition(format!(
            "no CUDA driver on this machine: {reason} (the driver is installed with the GPU; a CUDA toolkit is not needed)"
        ))),
    }
}

extern "C" fn unavailable() -> c_int {
    STUB_LIBRARY
}

/// Stands in for `cuGetErrorString` and `cuGetErrorName`, whose callers read the text without looking at the status.
///
/// # Safety
/// `text` is null or may be written.
unsafe extern "C" fn unavailable_text(_status: c_int, text: *mut *const c_char) -> c_int {
    if !text.is_null() {
        // SAFETY: by the function's contract.
        unsafe { *text = c"no CUDA driver on this machine".as_ptr() };
    }
    0
}

/// Finds `name` in the driver and stores its address in `slot`. Called once per name by the jump's first use.
///
/// # Safety
/// `name` is a NUL-terminated name and `slot` the slot of that name's jump.
unsafe extern "C" fn resolve(name: *const c_char, slot: *const AtomicUsize) -> usize {
    let found = match driver() {
        // SAFETY: the handle is an open library and the name is NUL-terminated.
        Ok(handle) => unsafe { libc::dlsym(*handle as *mut c_void, name) as usize },
        Err(_) => 0,
    };
    let address = if found != 0 {
        found
    } else {
        // SAFETY: by the function's contract.
        match unsafe { CStr::from_ptr(name) }.to_bytes() {
            b"cuGetErrorString" | b"cuGetErrorName" => unavailable_text as *const () as usize,
            _ => unavailable as *const () as usize,
        }
    };
    // SAFETY: by the function's contract. Two threads may store the same address.
    unsafe { (*slot).store(address, Ordering::Release) };
    address
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
macro_rules! jumps {
    ($($name:ident)*) => {
        // The binder keeps every register that can carry an argument, calls `resolve` and goes where it says.
        std::arch::global_asm!(
            ".pushsection .text.oeq_driver_bind,\"ax\",@progbits",
            ".balign 16",
            ".Loeq_driver_bind:",
            "push rbp",
            "mov rbp, rsp",
            "sub rsp, 192",
            "and rsp, -16",
            "mov [rsp], rdi",
            "mov [rsp + 8], rsi",
            "mov [rsp + 16], rdx",
            "mov [rsp + 24], rcx",
            "mov [rsp + 32], r8",
            "mov [rsp + 40], r9",
            "movaps [rsp + 48], xmm0",
            "movaps [rsp + 64], xmm1",
            "movaps [rsp + 80], xmm2",
            "movaps [rsp + 96], xmm3",
            "movaps [rsp + 112], xmm4",
            "movaps [rsp + 128], xmm5",
            "movaps [rsp + 144], xmm6",
            "movaps [rsp + 160], xmm7",
            "mov rdi, rax",
            "mov rsi, r11",
            "call {resolve}",
            "mov r11, rax",
            "mov rdi, [rsp]",
            "mov rsi, [rsp + 8]",
            "mov rdx, [rsp + 16]",
            "mov rcx, [rsp + 24]",
            "mov r8, [rsp + 32]",
            "mov r9, [rsp + 40]",
            "movaps xmm0, [rsp + 48]",
            "movaps xmm1, [rsp + 64]",
            "movaps xmm2, [rsp + 80]",
            "movaps xmm3, [rsp + 96]",
            "movaps xmm4, [rsp + 112]",
            "movaps xmm5, [rsp + 128]",
            "movaps xmm6, [rsp + 144]",
            "movaps xmm7, [rsp + 160]",
            "mov rsp, rbp",
            "pop rbp",
            "jmp r11",
            ".popsection",
            $(concat!(
                ".pushsection .text.oeq_driver.", stringify!($name), ",\"ax\",@progbits\n",
                ".weak ", stringify!($name), "\n",
                ".hidden ", stringify!($name), "\n",
                ".type ", stringify!($name), ",@function\n",
                stringify!($name), ":\n",
                "endbr64\n",
                "mov r11, [rip + .Loeq_slot_", stringify!($name), "]\n",
                "jmp r11\n",
                ".Loeq_first_", stringify!($name), ":\n",
                "endbr64\n",
                "lea rax, [rip + .Loeq_name_", stringify!($name), "]\n",
                "lea r11, [rip + .Loeq_slot_", stringify!($name), "]\n",
                "jmp .Loeq_driver_bind\n",
                ".Loeq_name_", stringify!($name), ":\n",
                ".asciz \"", stringify!($name), "\"\n",
                ".size ", stringify!($name), ", . - ", stringify!($name), "\n",
                ".popsection\n",
                ".pushsection .data.oeq_driver.", stringify!($name), ",\"aw\",@progbits\n",
                ".balign 8\n",
                ".Loeq_slot_", stringify!($name), ": .quad .Loeq_first_", stringify!($name), "\n",
                ".popsection\n",
            ),)*
            resolve = sym resolve,
        );
    };
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod table {
    use super::resolve;

    #[rustfmt::skip]
    jumps! {
        cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
        cuArrayGetPlane cuArrayGetSparseProperties cuCtxAttach cuCtxCreate_v2 cuCtxCreate_v3 cuCtxDestroy_v2
        cuCtxDetach cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent
        cuCtxGetDevice cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetLimit cuCtxGetSharedMemConfig
        cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxResetPersistingL2Cache
        cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetLimit cuCtxSetSharedMemConfig cuCtxSynchronize
        cuDestroyExternalMemory cuDestroyExternalSemaphore cuDeviceCanAccessPeer cuDeviceComputeCapability cuDeviceGet
        cuDeviceGetAttribute cuDeviceGetByPCIBusId cuDeviceGetCount cuDeviceGetDefaultMemPool
        cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute cuDeviceGetLuid cuDeviceGetMemPool cuDeviceGetName
        cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetProperties
        cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceGraphMemTrim
        cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain
        cuDevicePrimaryCtxSetFlags_v2 cuDeviceSetGraphMemAttribute cuDeviceSetMemPool cuDeviceTotalMem_v2
        cuDriverGetVersion cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord
        cuEventRecordWithFlags cuEventSynchronize cuExternalMemoryGetMappedBuffer
        cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetAttribute cuFuncGetModule
        cuFuncSetAttribute cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize
        cuGetErrorName cuGetErrorString cuGetExportTable cuGetProcAddress cuGraphAddChildGraphNode
        cuGraphAddDependencies cuGraphAddEmptyNode cuGraphAddEventRecordNode cuGraphAddEventWaitNode
        cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode
        cuGraphAddKernelNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode cuGraphAddMemsetNode
        cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphDestroyNode
        cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent
        cuGraphEventWaitNodeSetEvent cuGraphExecChildGraphNodeSetParams cuGraphExecDestroy
        cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
        cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
        cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams cuGraphExecMemcpyNodeSetParams
        cuGraphExecMemsetNodeSetParams cuGraphExecUpdate cuGraphExternalSemaphoresSignalNodeGetParams
        cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams
        cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetNodes cuGraphGetRootNodes
        cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiateWithFlags cuGraphInstantiate_v2
        cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
        cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphLaunch cuGraphMemAllocNodeGetParams
        cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams
        cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes
        cuGraphNodeGetType cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRetainUserObject cuGraphUpload
        cuGraphicsMapResources cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
        cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
        cuGraphicsUnregisterResource cuImportExternalMemory cuImportExternalSemaphore cuInit cuIpcCloseMemHandle
        cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2 cuLaunch
        cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync cuLaunchHostFunc
        cuLaunchKernel cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuMemAddressFree
        cuMemAddressReserve cuMemAdvise cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAllocHost_v2 cuMemAllocManaged
        cuMemAllocPitch_v2 cuMemAlloc_v2 cuMemCreate cuMemExportToShareableHandle cuMemFreeAsync cuMemFreeHost
        cuMemFree_v2 cuMemGetAccess cuMemGetAddressRange_v2 cuMemGetAllocationGranularity
        cuMemGetAllocationPropertiesFromHandle cuMemGetInfo_v2 cuMemHostAlloc cuMemHostGetDevicePointer_v2
        cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister cuMemImportFromShareableHandle cuMemMap
        cuMemMapArrayAsync cuMemPoolCreate cuMemPoolDestroy cuMemPoolExportPointer cuMemPoolExportToShareableHandle
        cuMemPoolGetAccess cuMemPoolGetAttribute cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
        cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync cuMemRangeGetAttribute
        cuMemRangeGetAttributes cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap cuMemcpy
        cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer cuMemcpy3DPeerAsync
        cuMemcpy3D_v2 cuMemcpyAsync cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2
        cuMemcpyDtoA_v2 cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoAAsync_v2
        cuMemcpyHtoA_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeer cuMemcpyPeerAsync cuMemsetD16Async
        cuMemsetD16_v2 cuMemsetD2D16Async cuMemsetD2D16_v2 cuMemsetD2D32Async cuMemsetD2D32_v2 cuMemsetD2D8Async
        cuMemsetD2D8_v2 cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2 cuMipmappedArrayCreate
        cuMipmappedArrayDestroy cuMipmappedArrayGetLevel cuMipmappedArrayGetSparseProperties cuModuleGetFunction
        cuModuleGetGlobal_v2 cuModuleGetSurfRef cuModuleGetTexRef cuModuleLoad cuModuleLoadData cuModuleLoadDataEx
        cuModuleLoadFatBinary cuModuleUnload cuOccupancyAvailableDynamicSMemPerBlock
        cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
        cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags cuParamSetSize cuParamSetTexRef
        cuParamSetf cuParamSeti cuParamSetv cuPointerGetAttribute cuPointerGetAttributes cuPointerSetAttribute
        cuProfilerInitialize cuProfilerStart cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamAddCallback
        cuStreamAttachMemAsync cuStreamBatchMemOp cuStreamBeginCapture_v2 cuStreamCopyAttributes cuStreamCreate
        cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamEndCapture cuStreamGetAttribute cuStreamGetCaptureInfo
        cuStreamGetCaptureInfo_v2 cuStreamGetCtx cuStreamGetFlags cuStreamGetPriority cuStreamIsCapturing cuStreamQuery
        cuStreamSetAttribute cuStreamSynchronize cuStreamUpdateCaptureDependencies cuStreamWaitEvent
        cuStreamWaitValue32 cuStreamWaitValue64 cuStreamWriteValue32 cuStreamWriteValue64 cuSurfObjectCreate
        cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray cuTexObjectCreate
        cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
        cuTexRefCreate cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray
        cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
        cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray
        cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2 cuTexRefSetArray cuTexRefSetBorderColor
        cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode
        cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray
        cuThreadExchangeStreamCaptureMode cuUserObjectCreate cuUserObjectRelease cuUserObjectRetain
        cuWaitExternalSemaphoresAsync
    }
}
