//! The server and its tools. Thin: everything is in [`cli`] and the library.

mod cli;
mod exit;

fn main() -> std::process::ExitCode {
    // The only place besides the model layer that knows what was compiled in.
    let build =
        cli::Build { cpu: cfg!(feature = "cpu"), mlx: cfg!(feature = "mlx"), fake: cfg!(feature = "fake") };
    cli::run(build).into()
}
