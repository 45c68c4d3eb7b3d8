//! Prints the payload of rows of seven numbers.

fn main() {
    println!("{}", own_family::payload(7));
}
