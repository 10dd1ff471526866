//! operating
