// The symbols of TeX by name, as Unicode has them.

const pairs = (text) =>
  Object.fromEntries(
    text
      .trim()
      .split(/\s+/)
      .map((it) => it.split("=")),
  );

export const IDENTIFIERS = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν
  xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
  Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
  infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ imath=ı jmath=ȷ wp=℘ degree=° top=⊤ bot=⊥
  angle=∠ square=□ blacksquare=■ triangle=△ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ checkmark=✓ prime=′ complement=∁
`);
export const LARGE_OPERATORS = pairs(`
  sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀
`);
export const OPERATORS = pairs(`
  times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=• oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ setminus=∖ wedge=∧ land=∧
  vee=∨ lor=∨ neg=¬ lnot=¬ cap=∩ cup=∪ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ ll=≪ gg=≫ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅
  propto=∝ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ perp=⊥ parallel=∥ mid=∣ nmid=∤ models=⊨
  vdash=⊢ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹
  impliedby=⟸ iff=⟺ mapsto=↦ longrightarrow=⟶ longleftarrow=⟵ longmapsto=⟼ uparrow=↑ downarrow=↓ Uparrow=⇑ Downarrow=⇓
  nearrow=↗ searrow=↘ hookrightarrow=↪ rightharpoonup=⇀ rightleftharpoons=⇌ leadsto=⇝ forall=∀ exists=∃ nexists=∄ therefore=∴
  because=∵ colon=: coloneqq=≔ prec=≺ succ=≻ preceq=⪯ succeq=⪰ lesssim=≲ gtrsim=≳ doteq=≐ asymp=≍ bowtie=⋈ dagger=† ltimes=⋉
  lt=< gt=> leqslant=⩽ geqslant=⩾ trianglelefteq=⊴ sqcup=⊔ sqcap=⊓ amalg=⨿ %=% #=# $=$ &=& _=_
`);
export const DELIMITERS = pairs(`
  {={ }=} lbrace={ rbrace=} langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ lvert=| rvert=| lVert=‖ rVert=‖ vert=| Vert=‖
  |=‖ backslash=\\ lbrack=[ rbrack=]
`);
export const SPACES = {
  ",": "0.17em",
  ":": "0.22em",
  ";": "0.28em",
  "!": "-0.17em",
  " ": "0.3em",
  quad: "1em",
  qquad: "2em",
};
export const FUNCTIONS = new Set(
  (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim limsup liminf max min sup inf arg argmax argmin det " +
    "dim ker gcd lcm deg hom Pr mod bmod tr rank span sgn"
  ).split(" "),
);
