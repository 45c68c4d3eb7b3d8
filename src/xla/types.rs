//! The state type, registered once per XLA.
//!
//! A process can hold several XLAs, each with its own ids, so an id belongs to one api table. The list of known tables only
//! grows and is read without a lock, because every execute looks its id up.
//!
//! The type's name is made from the address of a static, so that two copies of this library in one process (one linked
//! into a host, one opened by Python) never take each other's states for their own.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::api::Api;
use super::ffi::{self, StructSize};
use crate::error::Result;
use crate::kernel::CallState;
use crate::sync::lock;

/// The id that a host fills in when it registers the type from the C table.
#[repr(transparent)]
#[derive(Debug)]
pub struct TypeIdCell(UnsafeCell<ffi::TypeId>);

// SAFETY: the cell is written by hosts while they register, before any handler runs, as XLA's own static ids are; reads
// here are of one aligned word.
unsafe impl Sync for TypeIdCell {}

impl TypeIdCell {
    /// The address that a host writes to.
    #[must_use]
    pub fn address(&self) -> *mut ffi::TypeId {
        self.0.get()
    }
}

/// Where the host's id goes.
pub static TABLE_TYPE_ID: TypeIdCell = TypeIdCell(UnsafeCell::new(ffi::TypeId { type_id: 0 }));

/// How XLA destroys a state.
pub static TYPE_INFO: ffi::TypeInfo = ffi::TypeInfo {
    struct_size: ffi::TypeInfo::STRUCT_SIZE,
    extension_start: ptr::null_mut(),
    deleter: Some(delete_state),
};

// SAFETY: the structure is constant; the null extension pointer is never written through.
unsafe impl Sync for ffi::TypeInfo {}

/// Destroys a call site's state.
///
/// # Safety
/// `state` is a pointer that [`super::stages`] gave to XLA, and is not used again.
pub unsafe extern "C" fn delete_state(state: *mut c_void) {
    if state.is_null() {
        return;
    }
    // SAFETY: by the function's contract, it came from `Box::into_raw`.
    let state = unsafe { Box::from_raw(state.cast::<CallState>()) };
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(state)));
}

/// The type's name, the same for the life of the process.
pub fn name() -> &'static CStr {
    static NAME: OnceLock<CString> = OnceLock::new();
    NAME.get_or_init(|| CString::new(format!("oeq_native.CallState.{:p}", &raw const TYPE_INFO)).unwrap_or_default())
}

struct Node {
    api: Api,
    id: ffi::TypeId,
    next: *mut Node,
}

static KNOWN: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

fn known(api: Api) -> Option<ffi::TypeId> {
    let mut node = KNOWN.load(Ordering::Acquire);
    // SAFETY: nodes are leaked, complete before they are published, and never change.
    while let Some(found) = unsafe { node.as_ref() } {
        if found.api == api {
            return Some(found.id);
        }
        node = found.next;
    }
    None
}

/// The state type's id in one XLA, registered there if it was not.
///
/// # Errors
/// XLA refuses every way of registering it.
#[inline]
pub fn id_in(api: Api) -> Result<ffi::TypeId> {
    match known(api) {
        Some(id) => Ok(id),
        None => register(api),
    }
}

#[cold]
fn register(api: Api) -> Result<ffi::TypeId> {
    static WRITING: Mutex<()> = Mutex::new(());
    let _writing = lock(&WRITING);
    if let Some(id) = known(api) {
        return Ok(id);
    }
    let id = ask(api)?;
    let node = Box::new(Node { api, id, next: KNOWN.load(Ordering::Relaxed) });
    KNOWN.store(Box::into_raw(node), Ordering::Release);
    Ok(id)
}

/// Registers the type under a name of our own, not the table's: a host may register what the table offers before or after
/// the targets, and XLA refuses a name that it has already with any id but the same.
fn ask(api: Api) -> Result<ffi::TypeId> {
    let mut id = ffi::TypeId { type_id: 0 };
    api.register_type(&format!("{}.own", name().to_string_lossy()), &mut id, &TYPE_INFO)?;
    Ok(id)
}
