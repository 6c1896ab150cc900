//! The raw calls into MLX that mlx-rs has no safe function for: one wrapper each.
//!
//! Two things live here besides: the **first call**, which MLX wants to come from a
//! thread that stays, and the **stream pool**. A thread that evaluates gets a stream and
//! with it a permanent OS thread of MLX's, so streams are never thrown away: an instance
//! leases one exclusively and gives it back when its arrays are gone.
//!
//! Not here: anything that knows models. `unsafe` of the MLX backend stays in this file.

#![allow(unsafe_code, reason = "raw calls into mlx-c; one safe wrapper a function")]

use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::{Rc, Weak};
use std::sync::{Mutex, OnceLock, PoisonError};

use mlx_rs::{Array, Device, Dtype, Stream};

use crate::types::EngineError;

/// Which of MLX's devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MlxDevice {
    /// MLX's own CPU device: slow, but it runs everywhere.
    Cpu,
    /// Metal on a Mac.
    Gpu,
}

impl MlxDevice {
    fn raw(self) -> mlx_sys::mlx_device_type {
        match self {
            Self::Cpu => mlx_sys::mlx_device_type__MLX_CPU,
            Self::Gpu => mlx_sys::mlx_device_type__MLX_GPU,
        }
    }

    fn slot(self) -> usize {
        match self {
            Self::Cpu => 0,
            Self::Gpu => 1,
        }
    }

    fn safe(self) -> Device {
        match self {
            Self::Cpu => Device::cpu(),
            Self::Gpu => Device::gpu(),
        }
    }
}

/// A stream that any one thread at a time may use.
struct RawStream(mlx_sys::mlx_stream);

// SAFETY: made by `mlx_stream_new_thread_unsafe`, the handle is not bound to a thread; the
// pool hands it to one owner at a time, which is the condition MLX sets.
unsafe impl Send for RawStream {}

static FREE: [Mutex<Vec<RawStream>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

/// Makes the process's first MLX call from a thread that never ends: whoever calls first is
/// MLX's main thread, and an instance's compute thread may end long before the process.
///
/// # Errors
/// `Device` when the library cannot be brought up.
pub fn start_runtime() -> Result<(), EngineError> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let spawned = std::thread::Builder::new().name("mlx-main".into()).spawn(move || {
                // An operation that returns a Result installs mlx-rs's error handler; without it
                // a failing raw call would end the process.
                let first = Stream::try_default_on_device(&Device::cpu()).map(drop);
                let _ = sender.send(first.map_err(|error| error.what().to_owned()));
                loop {
                    std::thread::park();
                }
            });
            match spawned {
                Ok(_) => receiver.recv().unwrap_or_else(|_| Err("MLX's first call panicked".into())),
                Err(error) => Err(format!("no thread for MLX: {error}")),
            }
        })
        .clone()
        .map_err(|message| EngineError::Device { message })
}

thread_local! {
    /// This thread's stream of each device, shared by all engines on it: a thread has one
    /// default stream, so a second lease would move the first engine's work onto its own.
    static HERE: RefCell<[Weak<StreamLease>; 2]> = const { RefCell::new([Weak::new(), Weak::new()]) };
}

/// A stream owned by one thread until the last user there is gone.
pub struct StreamLease {
    device: MlxDevice,
    stream: Option<RawStream>,
}

impl StreamLease {
    /// This thread's stream: one that it holds already, one from the pool, or a new one. It
    /// becomes the thread's default.
    ///
    /// # Errors
    /// `Device` when MLX refuses.
    pub fn take(device: MlxDevice) -> Result<Rc<Self>, EngineError> {
        if let Some(held) = HERE.with_borrow(|here| here[device.slot()].upgrade()) {
            return Ok(held);
        }
        let lease = Rc::new(Self::from_pool(device)?);
        HERE.with_borrow_mut(|here| here[device.slot()] = Rc::downgrade(&lease));
        Ok(lease)
    }

    fn from_pool(device: MlxDevice) -> Result<Self, EngineError> {
        start_runtime()?;
        Device::set_default(&device.safe());
        let pooled = FREE[device.slot()].lock().unwrap_or_else(PoisonError::into_inner).pop();
        let stream = pooled.unwrap_or_else(|| {
            // SAFETY: plain constructors; the device handle is freed right after its only use.
            unsafe {
                let raw = mlx_sys::mlx_device_new_type(device.raw(), 0);
                let stream = mlx_sys::mlx_stream_new_thread_unsafe(raw);
                mlx_sys::mlx_device_free(raw);
                RawStream(stream)
            }
        });
        // SAFETY: the handle is alive: it is either fresh or was never freed.
        let status = unsafe { mlx_sys::mlx_set_default_stream(stream.0) };
        let lease = Self { device, stream: Some(stream) };
        check(status, "setting the default stream").map(|()| lease)
    }
}

impl StreamLease {
    /// The device whose stream this is.
    pub fn device(&self) -> MlxDevice {
        self.device
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        // SAFETY: the handle is alive; waiting for its work is what makes it safe to hand on.
        let status = unsafe { mlx_sys::mlx_synchronize(stream.0) };
        if status == 0 {
            FREE[self.device.slot()].lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        } else {
            tracing::warn!("a stream of MLX could not be synchronised and is not used again");
        }
    }
}

fn check(status: i32, what: &str) -> Result<(), EngineError> {
    if status == 0 {
        return Ok(());
    }
    Err(EngineError::Device { message: format!("MLX failed at {what}") })
}

/// Hands a vector's buffer to MLX without copying; it is freed with the last reference.
///
/// # Errors
/// `InvalidPlan` when length and shape differ; `Device` when MLX refuses.
pub fn array_from_vec<T: Copy + Send + 'static>(
    values: Vec<T>,
    shape: &[i32],
    dtype: Dtype,
) -> Result<Array, EngineError> {
    let expected = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(usize::try_from(n).ok()?));
    if expected != Some(values.len()) || values.is_empty() || bytes_of(dtype) != size_of::<T>() {
        return Err(EngineError::InvalidPlan {
            message: format!("{} values of {} bytes for {shape:?} {dtype:?}", values.len(), size_of::<T>()),
        });
    }
    let mut values = Box::new(values);
    let data = values.as_mut_ptr().cast::<c_void>();
    let payload = Box::into_raw(values).cast::<c_void>();
    let rank = i32::try_from(shape.len()).unwrap_or(i32::MAX);
    // SAFETY: `data` points to as many bytes as shape and dtype say (checked above) and lives
    // until `release::<T>` drops the box behind `payload`, which MLX calls exactly once.
    let array = unsafe {
        mlx_sys::mlx_array_new_data_managed_payload(
            data,
            shape.as_ptr(),
            rank,
            dtype.into(),
            payload,
            Some(release::<T>),
        )
    };
    if array.ctx.is_null() {
        return Err(EngineError::Device { message: "MLX did not take a buffer over".into() });
    }
    // SAFETY: a fresh handle that nobody else owns.
    Ok(unsafe { Array::from_ptr(array) })
}

fn bytes_of(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Float32 | Dtype::Uint32 | Dtype::Int32 => 4,
        Dtype::Float16 | Dtype::Bfloat16 => 2,
        _ => 0,
    }
}

/// Frees the vector behind a managed array. Called by MLX, on any thread.
///
/// # Safety
/// `payload` must come from `Box::<Vec<T>>::into_raw` and be passed once.
unsafe extern "C" fn release<T>(payload: *mut c_void) {
    // SAFETY: promised by the caller. Dropping a vector of `Copy` values cannot panic.
    drop(unsafe { Box::from_raw(payload.cast::<Vec<T>>()) });
}

/// `target` with `update` written at `start`, one index an axis; in place when nobody else
/// holds the target.
///
/// # Errors
/// `InvalidPlan` when it does not fit; `Device` when MLX refuses.
pub fn write_at(target: &Array, update: &Array, start: &[i32]) -> Result<Array, EngineError> {
    let fits = target.ndim() == update.ndim()
        && target.ndim() == start.len()
        && target.shape().iter().zip(update.shape()).zip(start).all(|((whole, part), start)| {
            *start >= 0 && start.checked_add(*part).is_some_and(|end| end <= *whole)
        });
    if !fits {
        let message = format!("{:?} at {start:?} in {:?}", update.shape(), target.shape());
        return Err(EngineError::InvalidPlan { message });
    }
    if target.shape() == update.shape() {
        // MLX would give the update itself, perhaps a view of something long gone.
        return owned(update);
    }
    let to: Vec<i32> = start.iter().zip(update.shape()).map(|(start, size)| start + size).collect();
    let strides = vec![1i32; target.ndim()];
    let stream = Stream::thread_local_or_default();
    // SAFETY: all handles are alive for the call; the index arrays have the lengths given.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_slice_update(
            &mut result,
            target.as_ptr(),
            update.as_ptr(),
            start.as_ptr(),
            start.len(),
            to.as_ptr(),
            to.len(),
            strides.as_ptr(),
            strides.len(),
            stream.as_ptr(),
        );
        taken(result, status, "writing into the key-value cache")
    }
}

/// The same values in a buffer of their own. MLX's `contiguous` and `copy` may share their
/// input's; a product with one changes no number.
///
/// # Errors
/// `Device`.
pub fn owned(view: &Array) -> Result<Array, EngineError> {
    let one = Array::from_f32(1.0).as_dtype(view.dtype());
    view.contiguous()
        .and_then(|dense| mlx_rs::ops::multiply(&dense, &one?))
        .map_err(|error| EngineError::Device { message: error.what().to_owned() })
}

/// `target` with `updates[i]` written where the indices' `i`-th values say, along two axes; in
/// place when nobody else holds the target. `updates` is `[rows, …]` with the target's axes, of
/// which the two indexed are 1 long. Indices outside are undefined: they come from the host.
///
/// # Errors
/// `Device` when MLX refuses.
pub fn scatter(
    target: &Array,
    indices: [&Array; 2],
    updates: &Array,
    axes: [i32; 2],
) -> Result<Array, EngineError> {
    let stream = Stream::thread_local_or_default();
    let handles = indices.map(Array::as_ptr);
    // SAFETY: all handles are alive for the call; the list is freed after its only use.
    unsafe {
        let mut result = mlx_sys::mlx_array_new();
        let list = mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
        let status = mlx_sys::mlx_scatter(
            &mut result,
            target.as_ptr(),
            list,
            updates.as_ptr(),
            axes.as_ptr(),
            axes.len(),
            stream.as_ptr(),
        );
        mlx_sys::mlx_vector_array_free(list);
        taken(result, status, "scattering into the key-value cache")
    }
}

/// Owns a raw call's result, or frees it.
///
/// # Safety
/// `result` must be a handle that nobody else owns, written by the call that gave `status`.
unsafe fn taken(result: mlx_sys::mlx_array, status: i32, what: &str) -> Result<Array, EngineError> {
    if let Err(error) = check(status, what) {
        // SAFETY: promised by the caller; it is not used again.
        unsafe { mlx_sys::mlx_array_free(result) };
        return Err(error);
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { Array::from_ptr(result) })
}

/// Computes arrays, or only starts to where `wait` is false, and tells where each one's values
/// lie: that is decided when the work is handed to the device.
///
/// # Errors
/// `Device`.
pub fn evaluate<'a>(
    arrays: impl Iterator<Item = &'a Array> + Clone,
    wait: bool,
) -> Result<Vec<usize>, EngineError> {
    let done = if wait {
        mlx_rs::transforms::eval(arrays.clone())
    } else {
        mlx_rs::transforms::async_eval(arrays.clone())
    };
    done.map_err(|error| EngineError::Device { message: error.what().to_owned() })?;
    // SAFETY: the arrays were handed to the device, so each has a buffer; it is not read.
    Ok(arrays.map(|array| unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) } as usize).collect())
}

/// Whether MLX has a GPU here.
pub fn has_gpu() -> bool {
    cfg!(target_os = "macos")
}

/// MLX's version, as the library says.
pub fn version() -> String {
    // SAFETY: the string is ours to free after copying it out.
    unsafe {
        let mut text = mlx_sys::mlx_string_new();
        let status = mlx_sys::mlx_version(&mut text);
        let data = mlx_sys::mlx_string_data(text);
        let version = if status == 0 && !data.is_null() {
            std::ffi::CStr::from_ptr(data).to_string_lossy().into_owned()
        } else {
            "unknown".to_owned()
        };
        mlx_sys::mlx_string_free(text);
        version
    }
}

/// How many operations the unevaluated graph behind these arrays holds (for the tests that
/// hold the backend to its budget of nodes a layer).
///
/// # Errors
/// `Device` when the graph cannot be written out.
pub fn graph_operations(outputs: &[Array]) -> Result<usize, EngineError> {
    let lost = |what: &str| EngineError::Device { message: format!("cannot list the graph: {what}") };
    // SAFETY: every handle made here is freed here; the file is closed on all paths, and its
    // text is read through a buffer of its own size.
    let text = unsafe {
        let file = libc::tmpfile();
        if file.is_null() {
            return Err(lost("no temporary file"));
        }
        let namer = mlx_sys::mlx_node_namer_new();
        let handles: Vec<mlx_sys::mlx_array> = outputs.iter().map(Array::as_ptr).collect();
        let list = mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
        let status = mlx_sys::mlx_export_to_dot(file.cast(), namer, list);
        mlx_sys::mlx_vector_array_free(list);
        mlx_sys::mlx_node_namer_free(namer);
        libc::fflush(file);
        let size = usize::try_from(libc::ftell(file)).unwrap_or(0);
        libc::rewind(file);
        let mut bytes = vec![0u8; size];
        let read = libc::fread(bytes.as_mut_ptr().cast(), 1, size, file);
        libc::fclose(file);
        if status != 0 || read != size {
            return Err(lost("MLX failed"));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    };
    // In the dot file an operation is a node with a label; arrays are edges between them.
    Ok(text.lines().filter(|line| line.contains("shape=rectangle")).count())
}
