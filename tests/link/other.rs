//! Another Rust static library in the same program, with the standard library and a panic of its own.

#[unsafe(no_mangle)]
pub extern "C" fn other_answer() -> i32 {
    std::panic::set_hook(Box::new(|_| {}));
    let caught = std::panic::catch_unwind(|| {
        let text: String = std::hint::black_box(vec!["4", "2x"]).concat();
        text.parse::<i32>().expect("not a number")
    });
    let numbers: std::collections::HashMap<i32, i32> = (0..10).map(|i| (i, i * i)).collect();
    let thread = std::thread::spawn(move || numbers[&6] + 6);
    if caught.is_err() { thread.join().unwrap_or(-1) } else { -2 }
}
