//! The one error type of the crate, and how it is told to XLA and to C.
//!
//! An error is a code and one text. The text says what was wrong, where, and what would be right. Errors are cheap to
//! clone because one failed compilation is reported to everybody who waited for it.

use std::fmt;
use std::sync::Arc;

/// The result of every fallible operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Status codes, with the numbers of `absl::StatusCode`, which XLA's FFI and our C surface share.
///
/// The numbers are part of the C ABI: they are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Code {
    /// The caller passed something that can never work.
    InvalidArgument = 3,
    /// Something that was named does not exist.
    NotFound = 5,
    /// Something with this name is already there.
    AlreadyExists = 6,
    /// Memory, threads, disk or a device resource ran out.
    ResourceExhausted = 8,
    /// The system is not in the state that the call needs (no driver, no compiler).
    FailedPrecondition = 9,
    /// The host or the device does not offer what the call needs.
    Unimplemented = 12,
    /// A broken invariant, or an unexpected answer from XLA, NVRTC or the CUDA driver.
    Internal = 13,
    /// A passing condition; trying again may help.
    Unavailable = 14,
}

impl Code {
    /// The code's name as absl prints it, for example `FAILED_PRECONDITION`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
        }
    }

    /// The code of absl's number; [`Code::Internal`] for a number that has none here.
    #[must_use]
    pub(crate) const fn from_number(number: i32) -> Self {
        match number {
            3 => Self::InvalidArgument,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            12 => Self::Unimplemented,
            14 => Self::Unavailable,
            _ => Self::Internal,
        }
    }
}

/// What went wrong: a [`Code`] and a text for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: Arc<str>,
}

impl Error {
    /// Makes an error from its parts.
    #[must_use]
    pub fn new(code: Code, message: impl Into<Arc<str>>) -> Self {
        Self { code, message: message.into() }
    }

    /// [`Code::InvalidArgument`] with a text.
    #[must_use]
    pub fn invalid(message: impl Into<Arc<str>>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// [`Code::FailedPrecondition`] with a text.
    #[must_use]
    pub fn precondition(message: impl Into<Arc<str>>) -> Self {
        Self::new(Code::FailedPrecondition, message)
    }

    /// [`Code::Internal`] with a text.
    #[must_use]
    pub fn internal(message: impl Into<Arc<str>>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// The same error, with where it happened put before its text.
    #[must_use]
    pub fn context(self, place: impl fmt::Display) -> Self {
        Self { code: self.code, message: format!("{place}: {}", self.message).into() }
    }

    /// The status code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// The text, without the code.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_codes_are_one_another_s() {
        for number in 0..20 {
            let code = Code::from_number(number);
            assert!(code as i32 == number || code == Code::Internal, "{number}");
        }
        assert_eq!(Code::from_number(Code::FailedPrecondition as i32), Code::FailedPrecondition);
    }

    #[test]
    fn context_keeps_the_code_and_prepends_the_place() {
        let error = Error::precondition("no driver").context("tp_forward").context("oeq-native");
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert_eq!(error.to_string(), "FAILED_PRECONDITION: oeq-native: tp_forward: no driver");
    }
}
