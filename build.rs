//! Build script: tells the executables of this package where MLX's shared library lies.
//!
//! Off the Mac MLX is a shared library outside `target/` (see `native/README.md`). Its folder arrives as metadata of the
//! `mlx-sys` crate, from Cargo's build-script override; on a Mac there is no such metadata, because MLX is linked statically.
//! An rpath set here survives a `RUSTFLAGS` variable, which would discard flags of Cargo's configuration.
//! Without the feature `mlx` this does nothing.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_MLX").is_none() {
        return;
    }
    if let Ok(folder) = env::var("DEP_MLX_LIBRARY") {
        // One argument each by `-Xlinker`: a comma in the path would end it in the `-Wl,…` form.
        for argument in ["-rpath", folder.as_str()] {
            println!("cargo:rustc-link-arg=-Xlinker");
            println!("cargo:rustc-link-arg={argument}");
        }
    }
}
