from sparse_losses.demo import docstrings, debian
import pickle
for m,n in ((docstrings,"docstrings"),(debian,"debian")):
    c=m.load(); pickle.dump(c,open(f"/tmp/ctl/{n}.pkl","wb"))
    for part in ("train","validation","test"):
        rows=getattr(c,part)
        from collections import Counter
        print(n,part,len(rows),Counter(p.task if hasattr(p,"task") else len(p.document) and "x" for r in rows for p in r.pairs), [sum(len(p.document) for r in rows for p in r.pairs)/sum(len(r.pairs) for r in rows)])
    from sparse_losses.demo.corpus import pair_texts
    print([ (len(pair_texts(c.test,i)[0]), sum(map(len,pair_texts(c.test,i)[1]))/len(pair_texts(c.test,i)[1])) for i in range(len(c.tasks))], c.sources)
