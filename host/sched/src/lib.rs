//! Placeholder.
#![no_std]
extern crate alloc;
