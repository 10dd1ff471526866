//! privileges
