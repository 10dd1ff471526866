//! sql_surface
